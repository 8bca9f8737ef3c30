// The step of kernels that are shrunk together.
#pragma once

#include "optim_step/gpu_prox.h"

namespace loco::optim_step {

// Launches it for coupled work.
template <class Rule>
void step_together(const Parameters<Rule>& p, const ProxParameters& q, const ProxWork& work, void* stream);

}  // namespace loco::optim_step
