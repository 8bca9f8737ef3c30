// Vectors of the instruction set that a source is compiled for: 16 bytes on any CPU, 32 with AVX2, 64 with AVX-512.
//
// Lanes<T> has the arithmetic of float or double vectors, and Bf16Pairs that of pairs of bfloat16. An arithmetic
// multiplies words and adds the products to accumulators: multiply_add(a, b, c)[i] = a[i] * b[i] + c[i]. Pointers are
// to contiguous elements, without alignment. kWidth is the number of accumulators in a vector, kVectors the widest tile
// in vectors, and kPair the number of elements in a word. Square transposes squares of words.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/capability.h"
#include "common/dtype.h"

#if defined(LOCO_AVX2) || defined(LOCO_AVX512) || defined(LOCO_AVX512_BF16)
#include <immintrin.h>
// GCC 12 gives these warnings for its own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC diagnostic ignored "-Wpsabi"  // functions that return vectors are inlined, so their ABI does not matter

#define LOCO_UNROLL _Pragma("GCC unroll 16")

namespace loco {
LOCO_KERNELS_BEGIN

#if defined(LOCO_AVX512) || defined(LOCO_AVX512_BF16)
constexpr int kVectorBytes = 64, kMostVectors = 4;

LOCO_HD __m512 fused_multiply_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
LOCO_HD __m512d fused_multiply_add(__m512d a, __m512d b, __m512d c) { return _mm512_fmadd_pd(a, b, c); }
LOCO_HD __m512 f16_to_vector(const uint16_t* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

// Convert 32 elements of bfloat16: those at even positions to to[0], those at odd positions to to[1].
LOCO_HD void split_bf16(const uint16_t* at, __m512 (&to)[2]) {
  __m512i pairs = _mm512_loadu_si512(at);
  asm("" : "+v"(pairs));  // without this, the compiler would load it twice
  to[0] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  to[1] = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

// Round to bfloat16. The results are in the upper halves of the words; the lower halves are undefined. A NaN becomes
// quiet.
LOCO_HD __m512i rounded_to_bf16(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
}

// Undo split_bf16, with rounding.
LOCO_HD void join_bf16(const __m512 (&from)[2], uint16_t* at) {
  const __m512i even = _mm512_srli_epi32(rounded_to_bf16(from[0]), 16), odd = rounded_to_bf16(from[1]);
  _mm512_storeu_si512(at, _mm512_mask_mov_epi16(even, 0xaaaaaaaa, odd));
}
#elif defined(LOCO_AVX2)
constexpr int kVectorBytes = 32, kMostVectors = 2;

LOCO_HD __m256 fused_multiply_add(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
LOCO_HD __m256d fused_multiply_add(__m256d a, __m256d b, __m256d c) { return _mm256_fmadd_pd(a, b, c); }
LOCO_HD __m256 f16_to_vector(const uint16_t* at) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
#else
constexpr int kVectorBytes = 16, kMostVectors = 2;
#endif

// Write a vector whose first `count` elements are those at `from`, and the others zeros. Where there are masked loads
// it is a single store, as a load of it waits until each of several stores has reached the cache.
template <typename T>
LOCO_HD void copy_some(const T* from, int64_t count, T* to) {
#if defined(LOCO_AVX512) || defined(LOCO_AVX512_BF16)
  const int64_t bytes = count * sizeof(T);
  const __mmask64 mask = bytes < kVectorBytes ? (1ull << bytes) - 1 : ~0ull;
  _mm512_storeu_si512(to, _mm512_maskz_loadu_epi8(mask, from));
#else
  constexpr int kCount = kVectorBytes / sizeof(T);
#ifdef LOCO_AVX2
  if constexpr (sizeof(T) >= 4) {
    const __m256i words = _mm256_set1_epi32(static_cast<int>(count * sizeof(T) / 4));
    const __m256i mask = _mm256_cmpgt_epi32(words, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256i some = _mm256_maskload_epi32(reinterpret_cast<const int*>(from), mask);
    return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), some);
  }
#endif
  for (int i = 0; i < kCount; ++i) to[i] = 0;
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
#endif
}

// Transposes squares by plain loops.
struct PlainSquare {
  static constexpr int64_t kSize = 8;

  // Write to[b * to_row + a] = from[a][b], where rows of `from` are row_bytes apart.
  template <typename Word>
  static void transpose(const char* from, int64_t row_bytes, Word* to, int64_t to_row) {
    for (int64_t a = 0; a < kSize; ++a) {
      Word row[kSize];
      std::memcpy(row, from + a * row_bytes, sizeof row);
      LOCO_UNROLL for (int64_t b = 0; b < kSize; ++b) to[b * to_row + a] = row[b];
    }
  }
};

#if defined(LOCO_AVX512) || defined(LOCO_AVX512_BF16)
// Transposes 16 x 16 words of 4 bytes as PlainSquare does: loads put quarters of four rows next to each other in a
// vector, and shuffles then transpose 4 x 4 words.
struct WordSquare {
  static constexpr int64_t kSize = 16;

  template <typename Word>
  static void transpose(const char* from, int64_t row_bytes, Word* to, int64_t to_row) {
    LOCO_UNROLL for (int64_t first = 0; first < kSize; first += 4) {
      const char* const at = from + first * 4;
      Word* const column = to + first * to_row;
      const __m512 a = rows(at, row_bytes), b = rows(at + row_bytes, row_bytes);
      const __m512 c = rows(at + 2 * row_bytes, row_bytes), d = rows(at + 3 * row_bytes, row_bytes);
      const __m512 ab_low = _mm512_unpacklo_ps(a, b), cd_low = _mm512_unpacklo_ps(c, d);
      const __m512 ab_high = _mm512_unpackhi_ps(a, b), cd_high = _mm512_unpackhi_ps(c, d);
      _mm512_storeu_ps(column, _mm512_shuffle_ps(ab_low, cd_low, 0x44));
      _mm512_storeu_ps(column + to_row, _mm512_shuffle_ps(ab_low, cd_low, 0xee));
      _mm512_storeu_ps(column + 2 * to_row, _mm512_shuffle_ps(ab_high, cd_high, 0x44));
      _mm512_storeu_ps(column + 3 * to_row, _mm512_shuffle_ps(ab_high, cd_high, 0xee));
    }
  }

 private:
  // Load 16 bytes of each of rows 0, 4, 8 and 12.
  static LOCO_HD __m512 rows(const char* at, int64_t row_bytes) {
    const auto quarter = [&](int64_t row)
                             LOCO_INLINE { return _mm_loadu_ps(reinterpret_cast<const float*>(at + row * row_bytes)); };
    __m512 all = _mm512_castps128_ps512(quarter(0));
    all = _mm512_insertf32x4(all, quarter(4), 1);
    all = _mm512_insertf32x4(all, quarter(8), 2);
    return _mm512_insertf32x4(all, quarter(12), 3);
  }
};

// Returns the sum of the lanes of each of four vectors: first of pairs of lanes, of vectors 0 and 1 and of 2 and 3
// interleaved, then of four lanes of each vector.
LOCO_HD __m128 four_totals(const __m512 (&of)[4]) {
  const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(of[0], of[1]), _mm512_unpackhi_ps(of[0], of[1]));
  const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(of[2], of[3]), _mm512_unpackhi_ps(of[2], of[3]));
  const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
#else
using WordSquare = PlainSquare;
#endif

template <typename T>
struct Lanes {
  typedef T Vec __attribute__((vector_size(kVectorBytes)));
  typedef T Unaligned __attribute__((vector_size(kVectorBytes), aligned(4)));
  using In = Vec;
  using Word = T;
  using Acc = T;
  using Square = std::conditional_t<sizeof(T) == 4, WordSquare, PlainSquare>;
  static constexpr int kWidth = kVectorBytes / sizeof(T), kVectors = kMostVectors, kPair = 1;

  // A load is not a memcpy, because GCC 12 would keep arrays of vectors loaded that way on the stack.
  static LOCO_HD Vec load(const T* at) { return *reinterpret_cast<const Unaligned*>(at); }
  static LOCO_HD void store(T* at, Vec value) { *reinterpret_cast<Unaligned*>(at) = value; }
  static LOCO_HD In words(const T* at) { return load(at); }
  static LOCO_HD In broadcast(const char* at) { return *reinterpret_cast<const T*>(at) - Vec{}; }

  static LOCO_HD Vec multiply_add(In a, In b, Vec c) {
#if defined(LOCO_AVX2) || defined(LOCO_AVX512) || defined(LOCO_AVX512_BF16)
    return fused_multiply_add(a, b, c);
#else
    return a * b + c;
#endif
  }

  static LOCO_HD Vec load_f16(const uint16_t* at) {
#if defined(LOCO_AVX2) || defined(LOCO_AVX512) || defined(LOCO_AVX512_BF16)
    return f16_to_vector(at);
#else
    Vec value;
    for (int i = 0; i < kWidth; ++i) value[i] = f16_to_float(at[i]);
    return value;
#endif
  }

  // Write the sum of the lanes of each of four vectors.
  static LOCO_HD void totals(const Vec (&of)[4], T* to) {
#if defined(LOCO_AVX512) || defined(LOCO_AVX512_BF16)
    if constexpr (sizeof(T) == 4) {
      _mm_storeu_ps(to, four_totals(of));
    } else {
      LOCO_UNROLL for (int i = 0; i < 4; ++i) to[i] = _mm512_reduce_add_pd(of[i]);
    }
#else
    for (int i = 0; i < 4; ++i) {
      to[i] = of[i][0];
      for (int k = 1; k < kWidth; ++k) to[i] += of[i][k];
    }
#endif
  }
};

#ifdef LOCO_AVX512_BF16
// Words are pairs of bfloat16, the products of both of which are added to a float32 accumulator.
struct Bf16Pairs {
  using Word = uint32_t;
  using Acc = float;
  using In = __m512i;
  using Vec = __m512;
  using Square = WordSquare;
  static constexpr int kWidth = 16, kVectors = kMostVectors, kPair = 2;

  static LOCO_HD Vec load(const float* at) { return _mm512_loadu_ps(at); }
  static LOCO_HD void store(float* at, Vec value) { _mm512_storeu_ps(at, value); }
  static LOCO_HD In words(const uint32_t* at) { return _mm512_loadu_si512(at); }
  static LOCO_HD In broadcast(const char* at) {
    int word;
    std::memcpy(&word, at, sizeof word);
    return _mm512_set1_epi32(word);
  }
  static LOCO_HD Vec multiply_add(In a, In b, Vec c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }

  // Write a vector of words, or only the first `count`, each made of an element of row `low` and one of row `high`, or
  // zero if `high` is null.
  static LOCO_HD void pair(const uint16_t* low, const uint16_t* high, int64_t count, uint32_t* to) {
    const __mmask16 mask = mask_of(count);
    __m512i words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, low));
    if (high) {
      const __m512i upper = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, high));
      words = _mm512_or_si512(words, _mm512_slli_epi32(upper, 16));
    }
    _mm512_mask_storeu_epi32(to, mask, words);
  }

  // Round to bfloat16. The conversion treats subnormals as zeros; for sums, multiply_add has already done so.
  static LOCO_HD void round(Vec value, uint16_t* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(value));
  }
  static LOCO_HD void totals(const Vec (&of)[4], uint16_t* to) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), (__m128i)_mm_cvtneps_pbh(four_totals(of)));
  }

 private:
  static LOCO_HD __mmask16 mask_of(int64_t count) { return count < kWidth ? (1 << count) - 1 : 0xffff; }
};
#endif

LOCO_KERNELS_END
}  // namespace loco
