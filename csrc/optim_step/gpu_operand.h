// Elements of the step's operands in a kernel.
#pragma once

#include <cstdint>

#include "common/gpu_memory.h"
#include "optim_step/gpu_table.h"
#include "optim_step/math.h"

namespace loco::optim_step {

// N consecutive elements to memory at a 16-byte boundary. random: words for rounding bfloat16 stochastically, or null.
template <DType dtype, int N, typename T>
LOCO_DEVICE void store_vector(void* memory, int64_t i, const T (&values)[N], const uint32_t* random = nullptr) {
  Stored<dtype> stored[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if constexpr (dtype == DType::bf16) {
      stored[k] = random ? float_to_bf16_stochastic(values[k], random[k]) : float_to_bf16(values[k]);
    } else {
      stored[k] = narrowed<dtype, T>(values[k]);
    }
  }
  loco::store_vector(memory, i, stored);
}

// The last axis takes whatever is left.
template <typename Index>
LOCO_DEVICE int64_t offset_of(const Nest& nest, Index element) {
  int64_t offset = 0;
  for (int a = 0; a + 1 < nest.count; ++a) {
    const auto size = static_cast<Index>(nest.axes[a].size);
    offset += static_cast<int64_t>(element % size) * nest.axes[a].stride;
    element /= size;
  }
  return offset + static_cast<int64_t>(element) * nest.axes[nest.count - 1].stride;
}

// narrow: the tensor has less than 2^32 elements, so that divisions of 32 bits do.
LOCO_DEVICE int64_t offset_in(const Nest* nests, int32_t number, int64_t element, bool narrow) {
  if (number == kFlat) return element;
  const Nest& nest = nests[number];
  return narrow ? offset_of(nest, static_cast<uint32_t>(element)) : offset_of(nest, static_cast<uint64_t>(element));
}

template <typename T>
LOCO_DEVICE void store_any(DType dtype, void* memory, int64_t i, T value, bool stochastic, uint32_t random) {
  if (stochastic && dtype == DType::bf16) {
    in_global(static_cast<uint16_t*>(memory))[i] = float_to_bf16_stochastic(static_cast<float>(value), random);
  } else {
    store_any(dtype, memory, i, value);
  }
}

}  // namespace loco::optim_step
