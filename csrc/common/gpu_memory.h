// Loads and stores elements of any dtype in device code.
#pragma once

#include <vector_types.h>

#include <cstdint>
#include <type_traits>

#include "common/dtype.h"
#include "common/platform.h"

namespace loco {

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

// Tells the compiler that a pointer refers to global memory, which it cannot know of pointers read from a table.
template <typename P>
LOCO_DEVICE P* in_global(P* pointer) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(pointer));
#endif
  return pointer;
}

// Loads N consecutive elements, the first of which lies at a 16-byte boundary, and converts them to T.
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

// Stores N consecutive elements, already in their stored type, at a 16-byte boundary.
template <typename S, int N>
LOCO_DEVICE void store_vector(void* memory, int64_t i, const S (&values)[N]) {
  constexpr int kWords = N * sizeof(S) / sizeof(uint4);
  union {
    uint4 words[kWords];
    S values[N];
  } u;
#pragma unroll
  for (int k = 0; k < N; ++k) u.values[k] = values[k];
  auto* to = in_global(reinterpret_cast<uint4*>(static_cast<S*>(memory) + i));
#pragma unroll
  for (int k = 0; k < kWords; ++k) to[k] = u.words[k];
}

template <typename T>
LOCO_DEVICE T load_any(DType dtype, const void* memory, int64_t i) {
  switch (dtype) {
    case DType::f64:
      return widened<DType::f64, T>(in_global(static_cast<const double*>(memory))[i]);
    case DType::f32:
      return widened<DType::f32, T>(in_global(static_cast<const float*>(memory))[i]);
    case DType::bf16:
      return widened<DType::bf16, T>(in_global(static_cast<const uint16_t*>(memory))[i]);
    default:
      return widened<DType::f16, T>(in_global(static_cast<const uint16_t*>(memory))[i]);
  }
}

template <typename T>
LOCO_DEVICE void store_any(DType dtype, void* memory, int64_t i, T value) {
  switch (dtype) {
    case DType::f64:
      in_global(static_cast<double*>(memory))[i] = narrowed<DType::f64>(value);
      break;
    case DType::f32:
      in_global(static_cast<float*>(memory))[i] = narrowed<DType::f32>(value);
      break;
    case DType::bf16:
      in_global(static_cast<uint16_t*>(memory))[i] = narrowed<DType::bf16>(value);
      break;
    default:
      in_global(static_cast<uint16_t*>(memory))[i] = narrowed<DType::f16>(value);
  }
}

}  // namespace loco
