// CUDA's runtime functions, as far as the host code of kernels needs them: devices whose memory is the host's and whose
// streams have always finished. Another one is a link error.
#pragma once

#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>

#include "launch.h"

extern "C" {

inline cudaError_t cudaGetLastError() {
  const cudaError_t error = cuda_on_cpu::last_error;
  cuda_on_cpu::last_error = cudaSuccess;
  return error;
}
inline cudaError_t cudaPeekAtLastError() { return cuda_on_cpu::last_error; }
inline const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
    default:
      return "invalid configuration argument";
  }
}

inline cudaError_t cudaGetDeviceCount(int* count) { return *count = cuda_on_cpu::kDevices, cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = cuda_on_cpu::current_device, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= cuda_on_cpu::kDevices) return cudaErrorInvalidDevice;
  return cuda_on_cpu::current_device = device, cudaSuccess;
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

inline cudaError_t cudaMalloc(void** memory, size_t size) {
  *memory = std::aligned_alloc(256, (size + 255) / 256 * 256);
  return *memory != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFree(void* memory) { return std::free(memory), cudaSuccess; }
inline cudaError_t cudaMallocAsync(void** memory, size_t size, cudaStream_t) { return cudaMalloc(memory, size); }
inline cudaError_t cudaFreeAsync(void* memory, cudaStream_t) { return cudaFree(memory); }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  if (size > 0) std::memcpy(to, from, size);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, size, kind);
}
inline cudaError_t cudaMemset(void* to, int value, size_t size) {
  if (size > 0) std::memset(to, value, size);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t) {
  return cudaMemset(to, value, size);
}

}  // extern "C"
