// Loads and stores elements of any dtype in device code.
#pragma once

#include <vector_types.h>

#include <cstdint>

#include "common/dtype.h"
#include "common/platform.h"

namespace loco {

// Converts both halves of a word to float, the lower one first.
template <DType dtype>
LOCO_DEVICE void widen_pair(uint32_t word, float& low, float& high) {
  if constexpr (dtype == DType::bf16) {
    low = from_bits(word << 16);
    high = from_bits(word & 0xffff0000u);
  } else {
    low = f16_to_float(static_cast<uint16_t>(word));
    high = f16_to_float(static_cast<uint16_t>(word >> 16));
  }
}

// Returns two floats rounded to the halves of a word, `low` in its lower half.
template <DType dtype>
LOCO_DEVICE uint32_t narrowed_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t word;
  if constexpr (dtype == DType::bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
#else
  return static_cast<uint32_t>(narrowed<dtype>(high)) << 16 | narrowed<dtype>(low);
#endif
}

// Tells the compiler that a pointer refers to global memory, which it cannot know of pointers read from a table.
template <typename P>
LOCO_DEVICE P* in_global(P* pointer) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(pointer));
#endif
  return pointer;
}

// Returns x without the compiler knowing so. What is computed from the result is computed where it is needed; from x
// itself it would be computed before a loop over filters, and take registers in all of the loop.
LOCO_DEVICE uint32_t hidden(uint32_t x) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// N consecutive elements in their stored type, which take a multiple of 16 bytes.
template <DType dtype, int N>
union Vector {
  using S = Stored<dtype>;
  static constexpr int kParts = N * sizeof(S) / sizeof(uint4);
  uint4 parts[kParts];
  uint32_t words[4 * kParts];
  S values[N];
};

// Loads N consecutive elements. aligned: the first is at a 16-byte boundary, and they are loaded 16 bytes at a time.
template <DType dtype, int N>
LOCO_DEVICE Vector<dtype, N> load_stored(const void* memory, int64_t i, bool aligned = true) {
  using S = Stored<dtype>;
  Vector<dtype, N> v;
  const auto* at = in_global(static_cast<const S*>(memory) + i);
  if (aligned) {
#pragma unroll
    for (int k = 0; k < v.kParts; ++k) v.parts[k] = reinterpret_cast<const uint4*>(at)[k];
  } else if constexpr (sizeof(S) == 2) {
#pragma unroll
    for (int k = 0; k < N / 2; ++k) v.words[k] = static_cast<uint32_t>(at[2 * k + 1]) << 16 | at[2 * k];
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) v.values[k] = at[k];
  }
  return v;
}

// Stores N consecutive elements, likewise.
template <DType dtype, int N>
LOCO_DEVICE void store_stored(void* memory, int64_t i, const Vector<dtype, N>& v, bool aligned = true) {
  using S = Stored<dtype>;
  auto* at = in_global(static_cast<S*>(memory) + i);
  if (aligned) {
#pragma unroll
    for (int k = 0; k < v.kParts; ++k) reinterpret_cast<uint4*>(at)[k] = v.parts[k];
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) at[k] = v.values[k];
  }
}

// Loads N consecutive elements as load_stored does, and converts them to T.
template <DType dtype, int N, typename T>
LOCO_DEVICE void load_vector(const void* memory, int64_t i, T (&out)[N], bool aligned = true) {
  const Vector<dtype, N> v = load_stored<dtype, N>(memory, i, aligned);
  if constexpr (sizeof(Stored<dtype>) == 2 && sizeof(T) == 4) {
#pragma unroll
    for (int k = 0; k < N; k += 2) widen_pair<dtype>(v.words[k / 2], out[k], out[k + 1]);
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) out[k] = widened<dtype, T>(v.values[k]);
  }
}

// Rounds N consecutive elements to their stored type, and stores them as store_stored does.
template <DType dtype, int N, typename T>
LOCO_DEVICE void store_vector(void* memory, int64_t i, const T (&values)[N], bool aligned = true) {
  Vector<dtype, N> v;
  if constexpr (sizeof(Stored<dtype>) == 2 && sizeof(T) == 4) {
#pragma unroll
    for (int k = 0; k < N; k += 2) v.words[k / 2] = narrowed_pair<dtype>(values[k], values[k + 1]);
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) v.values[k] = narrowed<dtype>(values[k]);
  }
  store_stored<dtype, N>(memory, i, v, aligned);
}

template <typename T>
LOCO_DEVICE T load_any(DType dtype, const void* memory, int64_t i) {
  return with_dtype(dtype, [=](auto constant) {
    constexpr DType of = decltype(constant)::value;
    return widened<of, T>(in_global(static_cast<const Stored<of>*>(memory))[i]);
  });
}

template <typename T>
LOCO_DEVICE void store_any(DType dtype, void* memory, int64_t i, T value) {
  with_dtype(dtype, [=](auto constant) {
    constexpr DType of = decltype(constant)::value;
    in_global(static_cast<Stored<of>*>(memory))[i] = narrowed<of>(value);
  });
}

}  // namespace loco
