// The optimizer step on an NVIDIA GPU, without torch. Nothing here waits for the GPU.
#pragma once

#include <cstdint>

#include "optim_step/gpu_table.h"

namespace loco::optim_step {

struct CudaCall {
  const GpuTable* table;
  unsigned char* memory;  // on the GPU: a copy of the table's bytes, then scratch_bytes
  Options options;
  DeviceScalar grad_scale;  // gradients are divided by it, in memory too
  DeviceScalar found_inf;   // not zero: nothing changes
  Rounding rounding;
  void* stream;
};

// What a step needs on the GPU beyond the table's bytes.
template <class Rule>
int64_t scratch_bytes(const GpuTable& table);

// Rule: Sgd or Adam. Adam's counters are incremented.
template <class Rule>
void step_cuda(const CudaCall& call);

}  // namespace loco::optim_step
