// Barriers and warp collectives. Default arguments pass the place of each call in the source, which reports show and
// which tells one barrier from another.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "block.h"

#define CUDA_ON_CPU_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace cuda_on_cpu {

inline uint64_t meet_block(const char* call, bool vote, const char* file, int line) {
  return grid().meet({call, file, line, true, 0, vote, kNone});
}

inline uint64_t meet_warp(const char* call, unsigned mask, uint64_t value, int source, const char* file, int line) {
  if (!(mask >> grid().lane() & 1)) {
    fail("%s: lane %d calls %s with the mask %08x, which leaves it out, %s:%d", grid().kernel(), grid().lane(), call,
         mask, file, line);
  }
  return grid().meet({call, file, line, false, mask, value, source});
}

inline uint32_t votes(const char* call, unsigned mask, bool vote, const char* file, int line) {
  return static_cast<uint32_t>(meet_warp(call, mask, vote, kNone, file, line));
}

template <class T>
T shuffle(const char* call, unsigned mask, T value, int source, const char* file, int line) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = meet_warp(call, mask, bits, source, file, line);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The lanes of a shuffle's width that a lane belongs to.
inline int segment_begin(int width) { return grid().lane() & ~(width - 1); }

}  // namespace cuda_on_cpu

inline void __syncthreads(CUDA_ON_CPU_PLACE) { cuda_on_cpu::meet_block("__syncthreads", false, file, line); }
inline int __syncthreads_count(int predicate, CUDA_ON_CPU_PLACE) {
  return static_cast<int>(cuda_on_cpu::meet_block("__syncthreads_count", predicate != 0, file, line));
}
inline int __syncthreads_or(int predicate, CUDA_ON_CPU_PLACE) {
  return cuda_on_cpu::meet_block("__syncthreads_or", predicate != 0, file, line) != 0;
}
inline int __syncthreads_and(int predicate, CUDA_ON_CPU_PLACE) {
  return cuda_on_cpu::meet_block("__syncthreads_and", predicate == 0, file, line) == 0;
}

inline void __syncwarp(unsigned mask = 0xffffffff, CUDA_ON_CPU_PLACE) {
  cuda_on_cpu::votes("__syncwarp", mask, false, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_ON_CPU_PLACE) {
  return cuda_on_cpu::votes("__ballot_sync", mask, predicate != 0, file, line);
}
inline int __any_sync(unsigned mask, int predicate, CUDA_ON_CPU_PLACE) {
  return cuda_on_cpu::votes("__any_sync", mask, predicate != 0, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUDA_ON_CPU_PLACE) {
  return cuda_on_cpu::votes("__all_sync", mask, predicate == 0, file, line) == 0;
}
// CUDA does not promise that lanes run together, so that a mask of this lane only is a right answer, and kernels must
// be ready for it.
inline unsigned __activemask() { return 1u << cuda_on_cpu::grid().lane(); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, CUDA_ON_CPU_PLACE) {
  source = cuda_on_cpu::segment_begin(width) + (source & (width - 1));
  return cuda_on_cpu::shuffle("__shfl_sync", mask, value, source, file, line);
}

// A lane whose source is outside its segment keeps its own value.
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, CUDA_ON_CPU_PLACE) {
  const int lane = cuda_on_cpu::grid().lane(), source = lane - static_cast<int>(delta);
  const bool inside = source >= cuda_on_cpu::segment_begin(width);
  return cuda_on_cpu::shuffle("__shfl_up_sync", mask, value, inside ? source : lane, file, line);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, CUDA_ON_CPU_PLACE) {
  const int lane = cuda_on_cpu::grid().lane(), source = lane + static_cast<int>(delta);
  const bool inside = source < cuda_on_cpu::segment_begin(width) + width;
  return cuda_on_cpu::shuffle("__shfl_down_sync", mask, value, inside ? source : lane, file, line);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flipped, int width = warpSize, CUDA_ON_CPU_PLACE) {
  const int lane = cuda_on_cpu::grid().lane(), source = lane ^ flipped;
  const bool inside = source < cuda_on_cpu::segment_begin(width) + width;
  return cuda_on_cpu::shuffle("__shfl_xor_sync", mask, value, inside ? source : lane, file, line);
}

#undef CUDA_ON_CPU_PLACE
