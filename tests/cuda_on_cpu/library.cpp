// The CUDA operators as torch.ops.loco_ext_on_cpu, on CPU tensors: the glue and the kernels as they are, the GPU and
// what torch knows of it replaced.

#include "optim_step/bind_cuda.h"
#include "ring_prox/bind_cuda.h"
#include "schemas.h"

extern "C" {

int32_t aoti_torch_device_type_cuda() { return aoti_torch_device_type_cpu(); }

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return AOTI_TORCH_SUCCESS; }
}

STABLE_TORCH_LIBRARY(loco_ext_on_cpu, m) { loco::define_operators(m); }
STABLE_TORCH_LIBRARY_IMPL(loco_ext_on_cpu, CPU, m) {
  loco::optim_step::implement_cuda(m);
  loco::ring_prox::implement_cuda(m);
}
