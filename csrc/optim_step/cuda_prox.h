// The step of entries with a penalty: each of their kernels (output channels) ends with its prox.
#pragma once

#include <cstdint>

#include "optim_step/cuda.h"
#include "optim_step/gpu_task.h"

namespace loco::optim_step {

// Memory for kernels that are too large for a block's shared memory.
int64_t slot_bytes(const GpuTable& table);

// slots: slot_bytes of the GPU's memory, at a 16-byte boundary.
template <class Rule>
void step_with_prox(const CudaCall& call, const Parameters<Rule>& p, unsigned char* slots);

}  // namespace loco::optim_step
