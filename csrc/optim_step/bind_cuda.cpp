// Implements torch.ops.loco_ext.optim_step for tensors on an NVIDIA GPU.
#include "optim_step/bind_cuda.h"

#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <limits>

#include "common/cuda_upload.h"
#include "common/device.h"
#include "optim_step/bind.h"
#include "optim_step/cuda.h"
#include "optim_step/hyper.h"

namespace loco::optim_step {
namespace {

// Uploads the table's bytes to the device of `neighbour` and returns a tensor of them, followed by `scratch`
// uninitialised bytes.
Tensor upload_table(const std::vector<unsigned char>& bytes, int64_t scratch, TensorRef neighbour, void* stream) {
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(neighbour.handle, &handle));
  const Tensor like(handle);
  const auto size = static_cast<int64_t>(bytes.size());
  Tensor memory =
      torch::stable::new_empty(like, {std::max<int64_t>(size + scratch, 1)}, torch::headeronly::ScalarType::Byte,
                               std::nullopt, std::nullopt, std::nullopt);
  upload(bytes.data(), static_cast<unsigned char*>(memory.mutable_data_ptr()), size, stream);
  return memory;
}

DeviceScalar scalar_or_none(const std::optional<Tensor>& tensor, const char* name, const DeviceId& device) {
  return tensor ? device_scalar(scalar_view(*tensor, name, 0, device)) : DeviceScalar{nullptr, 0};
}

struct Cuda {
  using Prepared = GpuTable;

  // table: empty, or that of these tensors, of which the gradients may have moved.
  template <class Rule>
  static void step(Gather& gather, const StepArgs& args, GpuTable& table) {
    if (gather.steps().empty()) return;
    const DeviceId& device = gather.device();
    STD_TORCH_CHECK(device.type == aoti_torch_device_type_cuda(), "params[0]: expected a tensor on cuda, got one on ",
                    device_text(device));
    CudaCall call;
    call.grad_scale = scalar_or_none(args.grad_scale, "grad_scale", device);
    call.found_inf = scalar_or_none(args.found_inf, "found_inf", device);
    call.options = args.options;
    call.rounding = args.rounding();
    const torch::stable::accelerator::DeviceGuard guard(device.index);
    call.stream = current_stream(device.index);
    check_capture(is_capturing(call.stream), args);
    const Hyper hyper = read_hyper(gather, args, Rule::columns);
    if (!refresh(table, gather.steps(), hyper)) {
      for (size_t i = 0; i < gather.steps().size(); ++i) check_kernels(gather.steps()[i], i);
      build(table, kCudaDivision, gather.steps(), hyper, Rule::has_metric);
    }
    const Tensor memory = upload_table(table.bytes, scratch_bytes<Rule>(table), args.grads[0], call.stream);
    call.table = &table;
    call.memory = static_cast<unsigned char*>(memory.mutable_data_ptr());
    step_cuda<Rule>(call);
    const char* error = launch_error();
    STD_TORCH_CHECK(error == nullptr, "optim_step: the GPU refused a kernel: ", error);
  }

 private:
  static void check_kernels(const TensorStep& t, size_t index) {
    if (t.penalty == nullptr) return;
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    STD_TORCH_CHECK(t.filters <= most && t.numel / t.filters <= most, "params[", index,
                    "]: expected at most 2^31 - 1 filters and as many weights in each where there is a penalty, got ",
                    t.filters, " of ", t.numel / t.filters);
  }

  static void check_capture(bool capturing, const StepArgs& a) {
    if (!capturing) return;
    const bool first = std::any_of(a.first.begin(), a.first.end(), [](int64_t f) { return f != 0; });
    STD_TORCH_CHECK(!first, "first: expected 0 while a CUDA graph is captured, got 1: make one step before");
    STD_TORCH_CHECK(!a.seed, "seed: expected none while a CUDA graph is captured: every replay would round alike");
  }
};

}  // namespace

void implement_cuda(torch::stable::detail::StableLibrary& library) { implement<Cuda>(library); }

}  // namespace loco::optim_step
