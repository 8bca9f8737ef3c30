// Copies host bytes to global memory as kernel arguments: to[i] = from[i].
//
// from: [count] bytes on the host, contiguous. to: [count] bytes in global memory, contiguous, aligned to 16 bytes.
// CUDA copies a kernel's arguments when it is launched, so host memory may change as soon as the launch returns.
//
// The bytes are divided into payloads of at most kSmallPayload or kLargePayload bytes, one launch each. A thread writes
// 16 bytes. The threads of a warp read their arguments one after the other, so that blocks are small, for many
// multiprocessors to share the reading.
#include <algorithm>

#include "common/check.h"
#include "common/cuda_upload.h"
#include "common/launch.h"
#include "common/platform.h"

namespace loco {
namespace {

constexpr int kThreads = 64;
constexpr int kBytes = 16;  // that a thread writes
constexpr int kSmallPayload = 3968, kLargePayload = 32256;

template <int size>
struct alignas(16) Payload {
  unsigned char bytes[size];
};

template <int size>
__global__ void __launch_bounds__(kThreads)
    write_payload(const __grid_constant__ Payload<size> payload, unsigned char* to, int count) {
  const int k = blockIdx.x * kThreads + threadIdx.x;
  if (k < count / kBytes) reinterpret_cast<uint4*>(to)[k] = reinterpret_cast<const uint4*>(payload.bytes)[k];
}

template <int size>
void upload_part(const unsigned char* from, unsigned char* to, int64_t count, void* stream) {
  Payload<size> payload;
  std::copy_n(from, count, payload.bytes);
  constexpr int kPerBlock = kThreads * kBytes;
  const auto blocks = static_cast<unsigned>((count + kPerBlock - 1) / kPerBlock);
  LOCO_LAUNCH(write_payload<size>, blocks, kThreads, stream, payload, to, static_cast<int>(count));
}

}  // namespace

void upload(const unsigned char* from, unsigned char* to, int64_t count, void* stream) {
  while (count > 0) {
    const int64_t part = std::min<int64_t>(count, count > kSmallPayload ? kLargePayload : kSmallPayload);
    part > kSmallPayload ? upload_part<kLargePayload>(from, to, part, stream)
                         : upload_part<kSmallPayload>(from, to, part, stream);
    from += part, to += part, count -= part;
  }
}

const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  LOCO_CHECK(error == cudaSuccess, "CUDA: ", cudaGetErrorString(error));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace loco
