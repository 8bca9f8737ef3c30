#include "common/device.h"

#include <cuda_runtime_api.h>

#include "common/stable.h"

namespace loco {

void* current_stream(int device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  LOCO_CHECK(error == cudaSuccess, "CUDA: ", cudaGetErrorString(error));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace loco
