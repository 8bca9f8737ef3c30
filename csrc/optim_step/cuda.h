// The optimizer step on an NVIDIA GPU. It does not use torch, and no function here synchronizes with the GPU.
#pragma once

#include <cstdint>

#include "optim_step/gpu_table.h"

namespace loco::optim_step {

struct CudaCall {
  const GpuTable* table;
  const unsigned char* memory;  // a copy of the table's bytes in GPU memory
  unsigned char* scratch;       // scratch_bytes of GPU memory
  Options options;
  DeviceScalar grad_scale;  // gradients are divided by it, also in memory
  DeviceScalar found_inf;   // if not zero, nothing changes
  Rounding rounding;
  void* stream;
};

// Returns how many bytes of GPU memory a step needs beside the table.
template <class Rule>
int64_t scratch_bytes(const GpuTable& table);

// Launches the kernels of a step. Rule: Sgd or Adam. Adam's step counters are incremented.
template <class Rule>
void step_cuda(const CudaCall& call);

}  // namespace loco::optim_step
