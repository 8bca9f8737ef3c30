// Implements torch.ops.loco_ext.optim_step for tensors on an NVIDIA GPU.
#include <algorithm>
#include <cstring>
#include <limits>

#include "common/cuda_upload.h"
#include "optim_step/bind.h"
#include "optim_step/cuda.h"

namespace loco::optim_step {
namespace {

// Returns uninitialised bytes on the device of `neighbour`.
Tensor gpu_memory(int64_t bytes, TensorRef neighbour) {
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(neighbour.handle, &handle));
  return new_bytes(Tensor(handle), std::max<int64_t>(bytes, 1));
}

unsigned char* bytes_of(const Tensor& memory) { return static_cast<unsigned char*>(memory.mutable_data_ptr()); }

// A step's table and its copy in GPU memory.
class CudaTable {
 public:
  GpuTable table;

  // Returns the table in GPU memory. What has not changed there since the last step is not uploaded again. A CUDA graph
  // has a copy of its own and repeats its upload; one for another stream is new, since that one may run ahead.
  // changed: of the table's bytes, the number of those that may have changed.
  Tensor in_gpu_memory(int64_t changed, TensorRef neighbour, void* stream) {
    const std::vector<unsigned char>& bytes = table.bytes;
    const auto size = static_cast<int64_t>(bytes.size());
    if (is_capturing(stream)) {
      Tensor memory = gpu_memory(size, neighbour);
      upload(bytes.data(), bytes_of(memory), size, stream);
      return memory;
    }
    int64_t begin = 0, end = std::min(changed, size);
    if (!memory_ || stream != stream_ || bytes.size() != uploaded_.size()) {
      memory_ = gpu_memory(size, neighbour);
      stream_ = stream;
      uploaded_.resize(size);
      end = size;
    } else {
      while (begin < end && equal_at(begin)) begin += kUnit;
      while (begin < end && equal_at(end - kUnit)) end -= kUnit;
    }
    upload(bytes.data() + begin, bytes_of(*memory_) + begin, end - begin, stream);
    std::copy(bytes.begin() + begin, bytes.begin() + end, uploaded_.begin() + begin);
    return *memory_;
  }

  // Lets the next step upload everything.
  void forget() { memory_.reset(); }

 private:
  static constexpr int64_t kUnit = 16;  // sections of a table begin at multiples of it

  bool equal_at(int64_t at) const { return std::memcmp(&table.bytes[at], &uploaded_[at], kUnit) == 0; }

  std::optional<Tensor> memory_;
  std::vector<unsigned char> uploaded_;
  void* stream_ = nullptr;
};

DeviceScalar scalar_or_none(const std::optional<Tensor>& tensor, const char* name, const DeviceId& device) {
  return tensor ? device_scalar(scalar_view(*tensor, name, 0, device)) : DeviceScalar{nullptr, 0};
}

struct Cuda {
  using Prepared = CudaTable;

  // prepared: empty, or that of these tensors, of which the gradients may have moved.
  template <class Rule>
  static void step(Gather& gather, const StepArgs& args, CudaTable& prepared) {
    if (gather.steps().empty()) return;
    const DeviceId& device = gather.device();
    LOCO_CHECK(device.type == aoti_torch_device_type_cuda(), "params[0]: expected a tensor on cuda, got one on ",
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
    GpuTable& table = prepared.table;
    const bool refreshed = refresh(table, gather.steps(), hyper);
    if (!refreshed) {
      for (size_t i = 0; i < gather.steps().size(); ++i) check_kernels(gather.steps()[i], i);
      build(table, kCudaDivision, gather.steps(), hyper, Rule::has_metric);
    }
    const int64_t changed = refreshed ? table.entries : static_cast<int64_t>(table.bytes.size());
    const Tensor memory = prepared.in_gpu_memory(changed, args.grads[0], call.stream);
    const Tensor scratch = gpu_memory(scratch_bytes<Rule>(table), args.grads[0]);
    call.table = &table;
    call.memory = bytes_of(memory);
    call.scratch = bytes_of(scratch);
    step_cuda<Rule>(call);
    const char* error = launch_error();
    if (error != nullptr) prepared.forget();
    LOCO_CHECK(error == nullptr, "optim_step: the GPU refused a kernel: ", error);
  }

 private:
  static void check_kernels(const TensorStep& t, size_t index) {
    if (t.penalty == nullptr) return;
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    LOCO_CHECK(t.filters <= most && t.numel / t.filters <= most, "params[", index,
               "]: expected at most 2^31 - 1 filters and as many weights in each where there is a penalty, got ",
               t.filters, " of ", t.numel / t.filters);
  }

  static void check_capture(bool capturing, const StepArgs& a) {
    if (!capturing) return;
    const bool first = std::any_of(a.first.begin(), a.first.end(), [](int64_t f) { return f != 0; });
    LOCO_CHECK(!first, "first: expected 0 while a CUDA graph is captured, got 1: make one step before");
    LOCO_CHECK(!a.seed, "seed: expected none while a CUDA graph is captured: every replay would round alike");
  }
};

}  // namespace

void implement_cuda(torch::stable::detail::StableLibrary& library) { implement<Cuda>(library); }

}  // namespace loco::optim_step
