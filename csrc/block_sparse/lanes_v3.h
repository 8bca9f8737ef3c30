// Vector arithmetic on 32 bytes, for files that are compiled for AVX2 with fused multiply-adds. Its members are
// described in lanes_portable.h.
#pragma once

#include <immintrin.h>

#include "block_sparse/modes.h"

namespace loco::block_sparse::v3 {

struct Float {
  using Word = float;
  using Acc = float;
  using In = __m256;
  using Vec = __m256;
  using Square = PlainSquare<Float>;
  static constexpr int kWidth = 8, kVectors = 2, kPair = 1;

  static Vec load(const float* at) { return _mm256_loadu_ps(at); }
  static Vec load_f16(const uint16_t* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  }
  static void store(float* at, Vec value) { _mm256_storeu_ps(at, value); }
  static In words(const float* at) { return _mm256_loadu_ps(at); }
  static In broadcast(const char* at) { return _mm256_broadcast_ss(reinterpret_cast<const float*>(at)); }
  static Vec multiply_add(In a, In b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static LOCO_INLINE void totals(const Vec (&of)[4], Acc* to) { totals_of_lanes<Float>(of, to); }
};

struct Double {
  using Word = double;
  using Acc = double;
  using In = __m256d;
  using Vec = __m256d;
  using Square = PlainSquare<Double>;
  static constexpr int kWidth = 4, kVectors = 2, kPair = 1;

  static Vec load(const double* at) { return _mm256_loadu_pd(at); }
  static void store(double* at, Vec value) { _mm256_storeu_pd(at, value); }
  static In words(const double* at) { return _mm256_loadu_pd(at); }
  static In broadcast(const char* at) { return _mm256_broadcast_sd(reinterpret_cast<const double*>(at)); }
  static Vec multiply_add(In a, In b, Vec c) { return _mm256_fmadd_pd(a, b, c); }
  static LOCO_INLINE void totals(const Vec (&of)[4], Acc* to) { totals_of_lanes<Double>(of, to); }
};

}  // namespace loco::block_sparse::v3
