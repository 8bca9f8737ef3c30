// The CUDA step of parameters with a coupled penalty, whose filters are shrunk together.
#pragma once

#include "optim_step/gpu_prox.h"

namespace loco::optim_step {

// Launches the kernels of this step. work: coupled.
template <class Rule>
void step_together(const Parameters<Rule>& p, const ProxParameters& q, const ProxWork& work, void* stream);

}  // namespace loco::optim_step
