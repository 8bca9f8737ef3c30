// CUDA's runtime functions, as far as the host code of kernels needs them. Another one is a link error.
#pragma once

#include <cuda_runtime.h>

#include "launch.h"

extern "C" {

inline cudaError_t cudaGetLastError() {
  const cudaError_t error = cuda_on_cpu::last_error;
  cuda_on_cpu::last_error = cudaSuccess;
  return error;
}
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
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

}  // extern "C"
