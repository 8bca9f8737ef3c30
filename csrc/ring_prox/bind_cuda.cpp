// torch.ops.loco_ext.ring_norms and ring_prox on tensors of an NVIDIA GPU.
#include <limits>
#include <optional>
#include <vector>

#include "common/cuda_upload.h"
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
  LOCO_CHECK(reader.filter_count() <= most && reader.shape.numel() <= most,
             "weight: expected at most 2^31 - 1 filters and as many weights in each, got shape ",
             shape_text(reader.view));
  return {reader.filter_count(), reader.shape, placed(reader.view)};
}

// Copy a table to the GPU of `like`, to memory of `size` bytes, and call launch(memory, stream). The memory is released
// at once: the caching allocator reuses it in stream order, after the kernels.
template <class Launch>
void run(const std::vector<unsigned char>& table, int64_t size, const Reader& reader, const Tensor& like,
         const Launch& launch) {
  const torch::stable::accelerator::DeviceGuard guard(reader.device.index);
  void* stream = current_stream(reader.device.index);
  const Tensor memory = new_bytes(like, size);
  auto* bytes = static_cast<unsigned char*>(memory.mutable_data_ptr());
  upload(table.data(), bytes, static_cast<int64_t>(table.size()), stream);
  launch(bytes, stream);
  const char* error = launch_error();
  LOCO_CHECK(error == nullptr, "ring_prox: the GPU refused a kernel: ", error);
}

// Likewise for one call, with its table.
template <class Launch>
void run(const CudaCall& call, const Reader& reader, const Tensor& like, const Launch& launch) {
  if (call.filters == 0) return;
  const GpuTable table = build(call);
  run(table.bytes, static_cast<int64_t>(table.bytes.size()), reader, like,
      [&](unsigned char* memory, void* stream) { launch(table, memory, stream); });
}

Tensor ring_norms(Tensor weight, Ints rings, int64_t count) {
  const Reader reader(weight, rings, count);
  Tensor out = empty_norms(weight, reader);
  const CudaCall call = call_of(reader);
  run(call, reader, weight, [&](const GpuTable& table, const unsigned char* memory, void* stream) {
    norms_cuda(call, table, memory, out.mutable_data_ptr(), stream);
  });
  return out;
}

// Return a call that has the reader's shape. metric: may be null.
CudaCall prox_call(const Reader& reader, const Tensor& thresholds, const std::optional<Tensor>& squared,
                   const Tensor* metric, bool linf, const Tensor& out) {
  const bool on_device = device_of(thresholds).type != DeviceId::cpu().type;
  const ThresholdRows rows =
      read_thresholds(thresholds, squared, reader.filter_count(), on_device ? reader.device : DeviceId::cpu());
  CudaCall call = call_of(reader);
  if (metric) call.metric = placed(reader.view_like(*metric, "metric"));
  call.out = placed(reader.view_like(out, "out"));
  call.plain = rows.plain;
  call.squared = rows.squared;
  call.thresholds_stride = rows.stride;
  call.thresholds_on_device = on_device;
  call.linf = linf;
  return call;
}

Tensor ring_prox(Tensor weight, Ints rings, Tensor thresholds, std::optional<Tensor> squared,
                 std::optional<Tensor> metric, bool linf) {
  const Reader reader(weight, rings, thresholds.size(-1));
  Tensor out = torch::stable::empty_like(weight);
  const CudaCall call = prox_call(reader, thresholds, squared, metric ? &*metric : nullptr, linf, out);
  run(call, reader, weight, [&](const GpuTable& table, const unsigned char* memory, void* stream) {
    prox_cuda(call, table, memory, stream);
  });
  return out;
}

Ints next_rings(const Tensor& weight, const Ints& rings, size_t& begin) {
  size_t taps = 1;
  for (int64_t d = 2; d < weight.dim(); ++d) taps *= weight.size(d);
  LOCO_CHECK(taps <= rings.size() - begin, "rings: expected one entry for each tap of each weight, got ", rings.size());
  begin += taps;
  return {rings.begin() + (begin - taps), rings.begin() + begin};
}

std::vector<Tensor> joint_ring_prox(std::vector<Tensor> weights, Ints rings, std::vector<Tensor> thresholds,
                                    std::vector<Tensor> squared, std::vector<Tensor> metrics, bool linf) {
  const size_t count = weights.size();
  LOCO_CHECK(count > 0 && thresholds.size() == count && squared.size() == count &&
                 (metrics.empty() || metrics.size() == count),
             "weights: expected one or more, and for each of them thresholds, squared and, if any, a metric");
  std::vector<Reader> readers;
  readers.reserve(count);  // calls point into them
  std::vector<CudaCall> calls;
  std::vector<Tensor> outs;
  size_t taken = 0;
  for (size_t i = 0; i < count; ++i) {
    const Reader& reader =
        readers.emplace_back(weights[i], next_rings(weights[i], rings, taken), thresholds[i].size(-1));
    LOCO_CHECK(reader.device.index == readers[0].device.index, "weights[", i, "]: expected a tensor on ",
               device_text(readers[0].device), ", got one on ", device_text(reader.device));
    outs.push_back(torch::stable::empty_like(weights[i]));
    const Tensor* metric = metrics.empty() ? nullptr : &metrics[i];
    const CudaCall call = prox_call(reader, thresholds[i], squared[i], metric, linf, outs[i]);
    if (call.filters > 0) calls.push_back(call);
  }
  LOCO_CHECK(taken == rings.size(), "rings: expected one entry for each tap of each weight, got ", rings.size());
  if (calls.empty()) return outs;
  const JointTable table = build_joint(calls);
  run(table.bytes, table.memory, readers[0], weights[0],
      [&](unsigned char* memory, void* stream) { joint_prox_cuda(calls, table, memory, stream); });
  return outs;
}

}  // namespace

void implement_cuda(torch::stable::detail::StableLibrary& m) {
  m.impl("ring_norms", TORCH_BOX(&ring_norms));
  m.impl("ring_prox", TORCH_BOX(&ring_prox));
  m.impl("joint_ring_prox", TORCH_BOX(&joint_ring_prox));
}

}  // namespace loco::ring_prox
