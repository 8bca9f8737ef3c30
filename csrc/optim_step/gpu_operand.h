// Reading and writing elements of any type in a kernel.
#pragma once

#include <vector_types.h>

#include <cstdint>
#include <type_traits>

#include "optim_step/gpu_table.h"
#include "optim_step/math.h"

namespace loco::optim_step {

template <DType dtype>
using Stored =
    std::conditional_t<dtype == DType::f64, double, std::conditional_t<dtype == DType::f32, float, uint16_t>>;

template <DType dtype, typename T>
LOCO_DEVICE T widened(Stored<dtype> value) {
  if constexpr (dtype == DType::bf16) {
    return static_cast<T>(bf16_to_float(value));
  } else if constexpr (dtype == DType::f16) {
    return static_cast<T>(f16_to_float(value));
  } else {
    return static_cast<T>(value);
  }
}

template <DType dtype, typename T>
LOCO_DEVICE Stored<dtype> narrowed(T value) {
  if constexpr (dtype == DType::bf16) {
    return float_to_bf16(static_cast<float>(value));
  } else if constexpr (dtype == DType::f16) {
    return float_to_f16(static_cast<float>(value));
  } else {
    return static_cast<Stored<dtype>>(value);
  }
}

// Tells the compiler what it cannot know of pointers read from a table: that they are of the GPU's global memory.
template <typename P>
LOCO_DEVICE P* in_global(P* pointer) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(pointer));
#endif
  return pointer;
}

// N consecutive elements from memory at a 16-byte boundary.
template <DType dtype, int N, typename T>
LOCO_DEVICE void load_vector(const void* memory, int64_t i, T (&out)[N]) {
  using S = Stored<dtype>;
  constexpr int kWords = N * sizeof(S) / sizeof(uint4);
  union {
    uint4 words[kWords];
    S values[N];
  } u;
  const auto* from = in_global(reinterpret_cast<const uint4*>(static_cast<const S*>(memory) + i));
#pragma unroll
  for (int k = 0; k < kWords; ++k) u.words[k] = from[k];
#pragma unroll
  for (int k = 0; k < N; ++k) out[k] = widened<dtype, T>(u.values[k]);
}

// random: words for rounding bfloat16 stochastically, or null.
template <DType dtype, int N, typename T>
LOCO_DEVICE void store_vector(void* memory, int64_t i, const T (&values)[N], const uint32_t* random = nullptr) {
  using S = Stored<dtype>;
  constexpr int kWords = N * sizeof(S) / sizeof(uint4);
  union {
    uint4 words[kWords];
    S values[N];
  } u;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if constexpr (dtype == DType::bf16) {
      u.values[k] = random ? float_to_bf16_stochastic(values[k], random[k]) : float_to_bf16(values[k]);
    } else {
      u.values[k] = narrowed<dtype, T>(values[k]);
    }
  }
  auto* to = in_global(reinterpret_cast<uint4*>(static_cast<S*>(memory) + i));
#pragma unroll
  for (int k = 0; k < kWords; ++k) to[k] = u.words[k];
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
LOCO_DEVICE T load_any(DType dtype, const void* memory, int64_t i) {
  switch (dtype) {
    case DType::f64:
      return widened<DType::f64, T>(static_cast<const double*>(memory)[i]);
    case DType::f32:
      return widened<DType::f32, T>(static_cast<const float*>(memory)[i]);
    case DType::bf16:
      return widened<DType::bf16, T>(static_cast<const uint16_t*>(memory)[i]);
    default:
      return widened<DType::f16, T>(static_cast<const uint16_t*>(memory)[i]);
  }
}

template <typename T>
LOCO_DEVICE void store_any(DType dtype, void* memory, int64_t i, T value) {
  switch (dtype) {
    case DType::f64:
      static_cast<double*>(memory)[i] = narrowed<DType::f64>(value);
      break;
    case DType::f32:
      static_cast<float*>(memory)[i] = narrowed<DType::f32>(value);
      break;
    case DType::bf16:
      static_cast<uint16_t*>(memory)[i] = narrowed<DType::bf16>(value);
      break;
    default:
      static_cast<uint16_t*>(memory)[i] = narrowed<DType::f16>(value);
  }
}

template <typename T>
LOCO_DEVICE void store_any(DType dtype, void* memory, int64_t i, T value, bool stochastic, uint32_t random) {
  if (stochastic && dtype == DType::bf16) {
    static_cast<uint16_t*>(memory)[i] = float_to_bf16_stochastic(static_cast<float>(value), random);
  } else {
    store_any(dtype, memory, i, value);
  }
}

}  // namespace loco::optim_step
