// Registers the CUDA implementations of the operators with torch.
#include "optim_step/bind_cuda.h"
#include "ring_prox/bind_cuda.h"

STABLE_TORCH_LIBRARY_IMPL(loco_ext, CUDA, m) {
  loco::optim_step::implement_cuda(m);
  loco::ring_prox::implement_cuda(m);
}
