// The CUDA step of entries with a penalty: it ends with the prox of each filter.
#pragma once

#include <cstdint>

#include "optim_step/cuda.h"
#include "optim_step/gpu_task.h"

namespace loco::optim_step {

// Returns the bytes of GPU memory needed for filters that are too large for a block's shared memory.
int64_t prox_bytes(const GpuTable& table);

// Launches the kernels of this step. memory: prox_bytes of GPU memory, aligned to 16 bytes.
template <class Rule>
void step_with_prox(const CudaCall& call, const Parameters<Rule>& p, unsigned char* memory);

}  // namespace loco::optim_step
