// The CUDA operators as torch.ops.loco_ext_on_cpu, on CPU tensors: the glue and the kernels as they are, the GPU and
// what torch knows of it replaced.

#include "library.h"

#include <algorithm>

#include "devices.h"
#include "schemas.h"

extern "C" {

int32_t aoti_torch_device_type_cuda() { return aoti_torch_device_type_cpu(); }

// Every third call of an operator finds another stream than the one before, as does every call on another device. A
// guard is not null, and keeps nothing: none is within another.
AOTITorchError aoti_torch_create_device_guard(int32_t index, DeviceGuardHandle* guard) {
  static unsigned calls = 0;
  static const void* stream = nullptr;
  static int device = -1;
  cuda_on_cpu::current_device = std::max(index, 0);
  if (calls++ % 3 == 0 || device != cuda_on_cpu::current_device) {
    device = cuda_on_cpu::current_device;
    stream = cuda_on_cpu::change_stream(device);
  }
  cuda_on_cpu::current_stream = stream;
  *guard = reinterpret_cast<DeviceGuardHandle>(&cuda_on_cpu::current_device);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) {
  cuda_on_cpu::current_device = 0;
  cuda_on_cpu::current_stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

// The streams of all devices but the current one are unknown.
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t index, void** stream) {
  if (std::max(index, 0) != cuda_on_cpu::current_device) return AOTI_TORCH_FAILURE;
  *stream = const_cast<void*>(cuda_on_cpu::current_stream);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* index) {
  void* data = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &data));
  const auto found = cuda_on_cpu::device_of().find(reinterpret_cast<uintptr_t>(data));
  *index = found == cuda_on_cpu::device_of().end() ? -1 : found->second;
  return AOTI_TORCH_SUCCESS;
}
}

STABLE_TORCH_LIBRARY(loco_ext_on_cpu, m) { loco::define_operators(m); }
STABLE_TORCH_LIBRARY_IMPL(loco_ext_on_cpu, CPU, m) {
  loco::optim_step::implement_cuda(m);
  loco::ring_prox::implement_cuda(m);
}
