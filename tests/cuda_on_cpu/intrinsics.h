// CUDA's device functions, as far as kernels need them. One that is missing here is a compile error.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "block.h"

namespace cuda_on_cpu {

// A parameter that takes no part in deducing T.
template <class T>
struct Same {
  using type = T;
};
template <class T>
using SameT = typename Same<T>::type;

}  // namespace cuda_on_cpu

// Default arguments pass the place of each call in the source, which reports show and which tells one barrier from
// another.
#define CUDA_ON_CPU_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(CUDA_ON_CPU_PLACE) { cuda_on_cpu::grid().meet({"__syncthreads", file, line, true, 0, 0, 0}); }

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flipped, CUDA_ON_CPU_PLACE) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t));
  cuda_on_cpu::Grid& grid = cuda_on_cpu::grid();
  const int lane = grid.lane();
  if (!(mask >> lane & 1)) {
    cuda_on_cpu::fail("%s: lane %d calls __shfl_xor_sync with the mask %08x, which leaves it out, %s:%d", grid.kernel(),
                      lane, mask, file, line);
  }
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = grid.meet({"__shfl_xor_sync", file, line, false, mask, bits, lane ^ flipped});
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

#undef CUDA_ON_CPU_PLACE

// Threads change places here and where they wait: nothing can come between reading and writing.
template <class T>
T atomicAdd(T* address, cuda_on_cpu::SameT<T> value) {
  cuda_on_cpu::grid().yield();
  const T old = *address;
  *address = old + value;
  return old;
}

inline void __threadfence() {}
