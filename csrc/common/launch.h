// Launching kernels. Under nvcc as CUDA does it; any other compiler must bring a LOCO_LAUNCH of its own, as the tests'
// runner does, which executes kernels on the CPU.
#pragma once

#if defined(__CUDACC__)
#include <cuda_runtime.h>
// kernel: a __global__ function, in parentheses if its name has commas.
#define LOCO_LAUNCH(kernel, blocks, threads, stream, ...) \
  (kernel)<<<(blocks), (threads), 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#elif !defined(LOCO_LAUNCH)
#error "CUDA sources need nvcc, or a LOCO_LAUNCH"
#endif
