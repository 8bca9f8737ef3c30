// Small kernels, each right or with a mistake planted in it.
#pragma once

#include <cstdint>
#include <string>

namespace {

constexpr unsigned kAll = 0xffffffff;
constexpr int kThreads = 256, kWarps = kThreads / 32;

enum class Fault {
  none,
  missing_barrier,
  divergent_barrier,
  missing_lanes,
  wrong_mask,
  unwritten,
  out_of_bounds,
  shared_out_of_bounds,
  wrong_tail,
  misaligned,
  early_ticket
};

__device__ float warp_sum(float value) {
  for (int offset = warpSize / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAll, value, offset);
  return value;
}

// out[block] = sum of in over the block's share.
template <Fault fault>
__global__ void __launch_bounds__(kThreads) block_sum(const float* in, int64_t count, float* out) {
  __shared__ float sums[kWarps];
  const int lane = threadIdx.x % warpSize, warp = threadIdx.x / warpSize;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  float sum = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) sum += in[i];
  if constexpr (fault == Fault::wrong_mask) {
    sum += __shfl_xor_sync(0xffff, sum, 1);
  } else if (fault != Fault::missing_lanes || lane < 16) {
    sum = warp_sum(sum);
  }
  if (lane == 0 && (fault != Fault::unwritten || warp != 1)) {
    sums[warp + (fault == Fault::shared_out_of_bounds ? 1 : 0)] = sum;
  }
  if constexpr (fault == Fault::divergent_barrier) {
    if (warp == 0) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  } else if constexpr (fault != Fault::missing_barrier) {
    __syncthreads();
  }
  if (warp != 0) return;
  sum = warp_sum(lane < kWarps ? sums[lane] : 0);
  if (lane == 0) out[blockIdx.x] = sum;
}

// Copies bytes with 16-byte accesses between the first and the last 16-byte boundary. `from` and `to` must be equally
// far from such a boundary.
template <Fault fault>
__global__ void copy_bytes(const unsigned char* from, unsigned char* to, int64_t count) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, step = int64_t{gridDim.x} * blockDim.x;
  const int64_t past = reinterpret_cast<uintptr_t>(to) % 16, gap = (16 - past) % 16;
  const int64_t head = fault == Fault::misaligned ? 0 : gap < count ? gap : count;
  const int64_t vectors = (count - head) / 16 + (fault == Fault::out_of_bounds ? 1 : 0), tail = head + vectors * 16;
  if (thread < head) to[thread] = from[thread];
  for (int64_t i = thread; i < vectors; i += step) {
    reinterpret_cast<uint4*>(to + head)[i] = reinterpret_cast<const uint4*>(from + head)[i];
  }
  if (tail + thread < count - (fault == Fault::wrong_tail ? 1 : 0)) to[tail + thread] = from[tail + thread];
}

// Shuffles and barriers in a block whose last warp is not full and whose first threads return early.
__global__ void meetings(int* wrong, int* passed) {
  const int lane = threadIdx.x % warpSize;
  const auto expect = [&](bool right) { *wrong += !right; };
  expect(__shfl_xor_sync(kAll, double(lane), 3) == (lane ^ 3));
  expect(__shfl_xor_sync(lane < 4 ? 0xf : ~0xfu, lane, 1) == (lane ^ 1));
  if (threadIdx.x < 8) return;
  __syncthreads();
  expect(__shfl_xor_sync(threadIdx.x < 32 ? 0xffffff00 : 0xff, lane, 1) == (lane ^ 1));
  expect(__shfl_xor_sync(kAll, static_cast<long long>(lane), 4) == (lane ^ 4));
  if (threadIdx.x < 32) return;
  __syncthreads();
  ++*passed;
}

__global__ void note_order(std::string* note) {
  *note += std::to_string(blockIdx.x) + '.' + std::to_string(threadIdx.x) + ' ';
}

// AddressSanitizer's knowledge of a stack must outlive a wait.
__global__ void overrun_stack(int* out, int count) {
  int local[4] = {};
  int* volatile at = local;
  __syncthreads();
  for (int i = 0; i < count; ++i) at[i] += i;
  out[threadIdx.x] = at[0];
}

__global__ void big_shared(float* out) {
  __shared__ float big[13000];
  for (int i = threadIdx.x; i < 13000; i += blockDim.x) big[i] = 1;
  __syncthreads();
  out[threadIdx.x] = big[threadIdx.x];
}

// Transposes a block's values round in memory that the launch has asked for.
template <Fault fault>
__global__ void reverse_block(const float* in, float* out) {
  LOCO_SHARED(memory);
  auto* values = reinterpret_cast<float*>(memory);
  values[threadIdx.x + (fault == Fault::shared_out_of_bounds ? 1 : 0)] = in[threadIdx.x];
  if constexpr (fault != Fault::missing_barrier) __syncthreads();
  out[threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}

// Each sum takes two barriers, or one and two buffers in turn; with one of either a warp that is ahead spoils it.
template <Fault fault>
__global__ void repeated_sum(float* out) {
  __shared__ float sums[2];
  float total = 0;
  for (int i = 0; i < 4; ++i) {
    const float sum = warp_sum(static_cast<float>(i));
    if (threadIdx.x % warpSize == 0) sums[threadIdx.x / warpSize] = sum;
    __syncthreads();
    total += sums[0] + sums[1];
    if constexpr (fault != Fault::missing_barrier) __syncthreads();
  }
  out[threadIdx.x] = total;
}

// One thread of each block contributes a part; the last to draw a ticket adds them up, which must all have been
// written.
template <Fault fault>
__global__ void sum_by_last_block(float* parts, unsigned* tickets, float* sum) {
  if (threadIdx.x != 0) return;
  if (fault != Fault::early_ticket) parts[blockIdx.x] = 1;
  const unsigned ticket = atomicAdd(tickets, 1u);
  if (fault == Fault::early_ticket) {
    atomicAdd(tickets + 1, 1u);
    parts[blockIdx.x] = 1;
  }
  if (ticket + 1 < gridDim.x) return;
  for (unsigned i = 0; i < gridDim.x; ++i) *sum += parts[i];
}

// Each block waits for one more than there are.
__global__ void meet_one_too_many(unsigned* arrived) {
  if (threadIdx.x != 0) return;
  atomicAdd(arrived, 1u);
  while (atomicAdd(arrived, 0u) <= gridDim.x) continue;
}

__global__ void add_one(float* x) { x[threadIdx.x] += 1; }

struct alignas(16) Arguments {
#if defined(PLANTED_BIG_PARAMETERS)
  unsigned char bytes[32752];
#else
  unsigned char bytes[32736];
#endif
};

// 32736 + 8 + 8 bytes of parameters. The copy is the thread's own.
__global__ void sum_arguments(Arguments arguments, int first, unsigned long long* sum) {
  for (unsigned i = first; i < sizeof arguments.bytes; ++i) arguments.bytes[0] ^= arguments.bytes[i];
  *sum += arguments.bytes[0];
}

}  // namespace
