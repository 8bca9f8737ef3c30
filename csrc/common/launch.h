// Launches kernels. Under nvcc these macros are CUDA launches. Any other compiler must define them itself, as the
// tests' runner does, which executes kernels on the CPU.
#pragma once

#if defined(__CUDACC__)
#include <cuda_runtime.h>

#include <algorithm>
// kernel: a __global__ function, in parentheses if its name contains commas.
#define LOCO_LAUNCH(kernel, blocks, threads, stream, ...) \
  LOCO_LAUNCH_SHARED(kernel, blocks, threads, 0, stream, __VA_ARGS__)
// Launches with `bytes` of dynamic shared memory per block, in addition to its __shared__ variables. The kernel
// declares LOCO_SHARED(name) to get a pointer to these bytes, aligned to 16 bytes.
#define LOCO_LAUNCH_SHARED(kernel, blocks, threads, bytes, stream, ...) \
  (kernel)<<<(blocks), (threads), (bytes), static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#define LOCO_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
// Launches at most `blocks` blocks, and no more than run at the same time, so that they can wait for one another.
#define LOCO_LAUNCH_TOGETHER(kernel, blocks, threads, bytes, stream, ...) \
  ::loco::launch_together((kernel), (blocks), (threads), (bytes), (stream), __VA_ARGS__)

namespace loco {

template <class... Params>
void launch_together(void (*kernel)(Params...), unsigned blocks, unsigned threads, unsigned bytes, void* stream,
                     Params... params) {
  int device = 0, multiprocessors = 0, of_each = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_each, kernel, threads, bytes);
  void* pointers[] = {&params...};
  cudaLaunchCooperativeKernel(kernel, std::min(blocks, static_cast<unsigned>(multiprocessors * of_each)), threads,
                              pointers, bytes, static_cast<cudaStream_t>(stream));
}

}  // namespace loco
#elif !defined(LOCO_LAUNCH)
#error "CUDA sources need nvcc, or a LOCO_LAUNCH"
#endif
