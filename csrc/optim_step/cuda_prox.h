// The step of entries with a penalty: each of their kernels (output channels) ends with its prox.
#pragma once

#include <cstdint>

#include "optim_step/cuda.h"
#include "optim_step/gpu_task.h"

namespace loco::optim_step {

// Memory for kernels that are too large for a block's shared memory, and for those that are shrunk together.
int64_t prox_bytes(const GpuTable& table);

// memory: prox_bytes of the GPU's, at a 16-byte boundary.
template <class Rule>
void step_with_prox(const CudaCall& call, const Parameters<Rule>& p, unsigned char* memory);

}  // namespace loco::optim_step
