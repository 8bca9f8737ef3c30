// Registers the CUDA implementations of the operators with torch.
#include "schemas.h"

STABLE_TORCH_LIBRARY_IMPL(loco_ext, CUDA, m) {
  loco::optim_step::implement_cuda(m);
  loco::ring_prox::implement_cuda(m);
}
