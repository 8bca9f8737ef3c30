// torch.ops.loco_ext.ring_norms and ring_prox on tensors of an NVIDIA GPU.
#include "ring_prox/bind_cuda.h"

#include <torch/csrc/stable/accelerator.h>

#include <limits>
#include <optional>
#include <vector>

#include "common/cuda_upload.h"
#include "common/device.h"
#include "ring_prox/bind.h"
#include "ring_prox/cuda.h"
#include "ring_prox/gpu_table.h"

namespace loco::ring_prox {
namespace {

Placed placed(const View& view) {
  Placed result{view.data, view.dtype, view.strides[0], view.strides[1], {0}};
  for (int64_t d = 2; d < view.ndim; ++d) {
    std::vector<int64_t> longer;
    for (const int64_t offset : result.tap_offsets) {
      for (int64_t k = 0; k < view.sizes[d]; ++k) longer.push_back(offset + k * view.strides[d]);
    }
    result.tap_offsets = longer;
  }
  return result;
}

CudaCall call_of(const Reader& reader) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  STD_TORCH_CHECK(reader.filter_count() <= most && reader.shape.numel() <= most,
                  "weight: expected at most 2^31 - 1 filters and as many weights in each, got shape ",
                  shape_text(reader.view.sizes, reader.view.ndim));
  return {reader.filter_count(), reader.shape, placed(reader.view)};
}

// Copy the call's table, with `more` bytes behind it, to the weight's GPU and call launch(table, its device copy,
// stream). The device memory of the copy is released at once: the caching allocator reuses it in stream order, after
// the kernels.
template <class Launch>
void run(const CudaCall& call, const Reader& reader, const Tensor& weight, int64_t more, const Launch& launch) {
  if (call.filters == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(reader.device.index);
  void* stream = current_stream(reader.device.index);
  const GpuTable table = build(call);
  const auto size = static_cast<int64_t>(table.bytes.size());
  const Tensor memory = torch::stable::new_empty(weight, {size + more}, torch::headeronly::ScalarType::Byte,
                                                 std::nullopt, std::nullopt, std::nullopt);
  auto* bytes = static_cast<unsigned char*>(memory.mutable_data_ptr());
  upload(table.bytes.data(), bytes, size, stream);
  launch(table, bytes, stream);
  const char* error = launch_error();
  STD_TORCH_CHECK(error == nullptr, "ring_prox: the GPU refused a kernel: ", error);
}

Tensor ring_norms(Tensor weight, Ints rings, int64_t count) {
  const Reader reader(weight, rings, count);
  Tensor out = empty_norms(weight, reader);
  const CudaCall call = call_of(reader);
  run(call, reader, weight, 0, [&](const GpuTable& table, unsigned char* memory, void* stream) {
    norms_cuda(call, table, memory, out.mutable_data_ptr(), stream);
  });
  return out;
}

Tensor prox(const Tensor& weight, const Ints& rings, const Tensor& thresholds, const std::optional<Tensor>& squared,
            const std::optional<Tensor>& metric, bool linf, bool joint) {
  const Reader reader(weight, rings, thresholds.size(-1));
  const bool on_device = device_of(thresholds).type != DeviceId::cpu().type;
  const ThresholdRows rows =
      read_thresholds(thresholds, squared, reader.filter_count(), on_device ? reader.device : DeviceId::cpu());
  Tensor out = torch::stable::empty_like(weight);
  CudaCall call = call_of(reader);
  if (metric) call.metric = placed(reader.view_like(*metric, "metric"));
  call.out = placed(reader.view_like(out, "out"));
  call.plain = rows.plain;
  call.squared = rows.squared;
  call.thresholds_stride = rows.stride;
  call.thresholds_on_device = on_device;
  call.linf = linf;
  const int64_t more = joint ? joint_bytes(call) : 0;
  run(call, reader, weight, more, [&](const GpuTable& table, unsigned char* memory, void* stream) {
    joint ? joint_prox_cuda(call, table, memory, stream) : prox_cuda(call, table, memory, stream);
  });
  return out;
}

Tensor ring_prox(Tensor weight, Ints rings, Tensor thresholds, std::optional<Tensor> squared,
                 std::optional<Tensor> metric, bool linf) {
  return prox(weight, rings, thresholds, squared, metric, linf, false);
}

Tensor joint_ring_prox(Tensor weight, Ints rings, Tensor thresholds, Tensor squared, std::optional<Tensor> metric,
                       bool linf) {
  return prox(weight, rings, thresholds, squared, metric, linf, true);
}

}  // namespace

void implement_cuda(torch::stable::detail::StableLibrary& m) {
  m.impl("ring_norms", TORCH_BOX(&ring_norms));
  m.impl("ring_prox", TORCH_BOX(&ring_prox));
  m.impl("joint_ring_prox", TORCH_BOX(&joint_ring_prox));
}

}  // namespace loco::ring_prox
