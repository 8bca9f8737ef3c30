// Launching kernels. Under nvcc as CUDA does it; any other compiler must bring these macros itself, as the tests'
// runner does, which executes kernels on the CPU.
#pragma once

#if defined(__CUDACC__)
#include <cuda_runtime.h>
// kernel: a __global__ function, in parentheses if its name has commas.
#define LOCO_LAUNCH(kernel, blocks, threads, stream, ...) \
  LOCO_LAUNCH_SHARED(kernel, blocks, threads, 0, stream, __VA_ARGS__)
// The same with so many bytes of shared memory for each block beside its __shared__ variables, which the kernel calls
// by a name that it declares: LOCO_SHARED(name); a pointer to bytes at a 16-byte boundary.
#define LOCO_LAUNCH_SHARED(kernel, blocks, threads, bytes, stream, ...) \
  (kernel)<<<(blocks), (threads), (bytes), static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#define LOCO_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#elif !defined(LOCO_LAUNCH)
#error "CUDA sources need nvcc, or a LOCO_LAUNCH"
#endif
