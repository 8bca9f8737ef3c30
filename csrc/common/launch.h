// Launches kernels. Under nvcc these macros are CUDA launches. Any other compiler must define them itself, as the
// tests' runner does, which executes kernels on the CPU.
#pragma once

#if defined(__CUDACC__)
#include <cuda_runtime.h>
// kernel: a __global__ function, in parentheses if its name contains commas.
#define LOCO_LAUNCH(kernel, blocks, threads, stream, ...) \
  LOCO_LAUNCH_SHARED(kernel, blocks, threads, 0, stream, __VA_ARGS__)
// Launches with `bytes` of dynamic shared memory per block, in addition to its __shared__ variables. The kernel
// declares LOCO_SHARED(name) to get a pointer to these bytes, aligned to 16 bytes.
#define LOCO_LAUNCH_SHARED(kernel, blocks, threads, bytes, stream, ...) \
  (kernel)<<<(blocks), (threads), (bytes), static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#define LOCO_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#elif !defined(LOCO_LAUNCH)
#error "CUDA sources need nvcc, or a LOCO_LAUNCH"
#endif
