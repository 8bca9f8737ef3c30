// Registers the optim_step operators for CUDA tensors.
#pragma once

#include <torch/csrc/stable/library.h>

namespace loco::optim_step {

void implement_cuda(torch::stable::detail::StableLibrary& library);

}  // namespace loco::optim_step
