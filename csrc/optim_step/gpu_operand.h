// Loads and stores elements of a step's operands in device code.
#pragma once

#include <cstdint>

#include "common/gpu_memory.h"
#include "optim_step/gpu_table.h"
#include "optim_step/math.h"

namespace loco::optim_step {

// A queue of N elements in their stored type, loaded from and stored at a 16-byte boundary unless they are not aligned.
// A loop takes some elements from the front and pushes as many at the back; unrolled or not, all elements stay in
// registers.
template <DType dtype, int N>
class Packed {
 public:
  LOCO_DEVICE void load(const void* memory, int64_t i, bool aligned = true) {
    all_ = load_stored<dtype, N>(memory, i, aligned);
  }

  LOCO_DEVICE void store(void* memory, int64_t i, bool aligned = true) const {
    store_stored<dtype, N>(memory, i, all_, aligned);
  }

  template <int n, typename T>
  LOCO_DEVICE void front(T (&out)[n]) const {
    Part<n> part;
#pragma unroll
    for (int k = 0; k < kWordsOf<n>; ++k) part.words[k] = all_.words[k];
#pragma unroll
    for (int k = 0; k < n; ++k) out[k] = widened<dtype, T>(part.values[k]);
  }

  template <int n>
  LOCO_DEVICE void pop() {
#pragma unroll
    for (int k = kWordsOf<n>; k < kWords; ++k) all_.words[k - kWordsOf<n>] = all_.words[k];
  }

  // Drops the first n elements and appends `values`. random: [n], words for stochastic rounding to bfloat16, or null.
  template <int n, typename T>
  LOCO_DEVICE void push(const T (&values)[n], const uint32_t* random = nullptr) {
    pop<n>();
    Part<n> part;
#pragma unroll
    for (int k = 0; k < n; ++k) {
      if constexpr (dtype == DType::bf16) {
        part.values[k] = random ? float_to_bf16_stochastic(values[k], random[k]) : float_to_bf16(values[k]);
      } else {
        part.values[k] = narrowed<dtype, T>(values[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kWordsOf<n>; ++k) all_.words[kWords - kWordsOf<n> + k] = part.words[k];
  }

 private:
  using S = Stored<dtype>;
  template <int n>
  static constexpr int kWordsOf = n * sizeof(S) / sizeof(uint32_t);
  static constexpr int kWords = kWordsOf<N>;

  template <int n>
  union Part {
    uint32_t words[kWordsOf<n>];
    S values[n];
  };

  Vector<dtype, N> all_;
};

// Returns an element's offset in a nest. The last axis takes the remaining index, whatever its size.
template <typename Index>
LOCO_DEVICE int64_t offset_of(const Nest& nest, Index element) {
  int64_t offset = 0;
#pragma unroll 1
  for (int a = 0; a + 1 < nest.count; ++a) {
    const auto size = static_cast<Index>(nest.axes[a].size);
    offset += static_cast<int64_t>(element % size) * nest.axes[a].stride;
    element /= size;
  }
  return offset + static_cast<int64_t>(element) * nest.axes[nest.count - 1].stride;
}

// Returns an element's offset in nest `number`, or the element itself if that is kFlat. narrow: the tensor has fewer
// than 2^32 elements, so 32-bit divisions suffice.
LOCO_DEVICE int64_t offset_in(const Nest* nests, int32_t number, int64_t element, bool narrow) {
  if (number == kFlat) return element;
  const Nest& nest = nests[number];
  return narrow ? offset_of(nest, static_cast<uint32_t>(element)) : offset_of(nest, static_cast<uint64_t>(element));
}

// Stores one element of any dtype; bfloat16 is rounded stochastically with the word `random` if `stochastic`.
template <typename T>
LOCO_DEVICE void store_any(DType dtype, void* memory, int64_t i, T value, bool stochastic, uint32_t random) {
  if (stochastic && dtype == DType::bf16) {
    in_global(static_cast<uint16_t*>(memory))[i] = float_to_bf16_stochastic(static_cast<float>(value), random);
  } else {
    store_any(dtype, memory, i, value);
  }
}

}  // namespace loco::optim_step
