// Vector arithmetic on 64 bytes, for files that are compiled for AVX-512. Its members are described in
// lanes_portable.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "block_sparse/modes.h"

namespace loco::block_sparse::v4 {

// Transposes 16 x 16 words of 4 bytes: loads put quarters of four rows next to each other in a vector, and shuffles
// then transpose 4 x 4 words.
struct Square16 {
  static constexpr int64_t kSize = 16;

  template <typename Word>
  static void transpose(const char* from, int64_t row_bytes, Word* to, int64_t to_row) {
    static_assert(sizeof(Word) == 4, "words of 4 bytes");
    columns(from, row_bytes,
            [&](int64_t column, __m512d words) LOCO_INLINE { _mm512_storeu_pd(to + column * to_row, words); });
  }

  // Transpose a square of which only the first `rows` rows are wanted: write `rows` words of each column to to +
  // places[column]. All rows are read.
  static void transpose_some(const char* from, int64_t row_bytes, int64_t rows, float* to, const int64_t* places) {
    if (rows == kSize) {
      columns(from, row_bytes,
              [&](int64_t column, __m512d words) LOCO_INLINE { _mm512_storeu_pd(to + places[column], words); });
      return;
    }
    const auto mask = static_cast<__mmask16>((1u << rows) - 1);
    columns(from, row_bytes, [&](int64_t column, __m512d words) LOCO_INLINE {
      _mm512_mask_storeu_ps(to + places[column], mask, _mm512_castpd_ps(words));
    });
  }

  // Transpose only the first four columns.
  template <typename Word>
  static LOCO_INLINE void transpose_four(const char* from, int64_t row_bytes, Word* to, int64_t to_row) {
    static_assert(sizeof(Word) == 4, "words of 4 bytes");
    four_columns(from, row_bytes,
                 [&](int64_t column, __m512d words) LOCO_INLINE { _mm512_storeu_pd(to + column * to_row, words); });
  }

  template <typename Store>
  static LOCO_INLINE void columns(const char* from, int64_t row_bytes, const Store& store) {
    LOCO_UNROLL for (int64_t first = 0; first < kSize; first += 4) {
      four_columns(from + first * 4, row_bytes,
                   [&](int64_t column, __m512d words) LOCO_INLINE { store(first + column, words); });
    }
  }

  template <typename Store>
  static LOCO_INLINE void four_columns(const char* at, int64_t row_bytes, const Store& store) {
    const __m512 a = rows(at, row_bytes), b = rows(at + row_bytes, row_bytes);
    const __m512 c = rows(at + 2 * row_bytes, row_bytes), d = rows(at + 3 * row_bytes, row_bytes);
    const __m512d ab_low = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)),
                  cd_low = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
    const __m512d ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b)),
                  cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
    store(0, _mm512_unpacklo_pd(ab_low, cd_low));
    store(1, _mm512_unpackhi_pd(ab_low, cd_low));
    store(2, _mm512_unpacklo_pd(ab_high, cd_high));
    store(3, _mm512_unpackhi_pd(ab_high, cd_high));
  }

  // Load 16 bytes of each of rows 0, 4, 8 and 12.
  static LOCO_INLINE __m512 rows(const char* at, int64_t row_bytes) {
    const auto quarter = [&](int64_t row)
                             LOCO_INLINE { return _mm_loadu_ps(reinterpret_cast<const float*>(at + row * row_bytes)); };
    __m512 all = _mm512_castps128_ps512(quarter(0));
    all = _mm512_insertf32x4(all, quarter(4), 1);
    all = _mm512_insertf32x4(all, quarter(8), 2);
    return _mm512_insertf32x4(all, quarter(12), 3);
  }
};

struct Float {
  using Word = float;
  using Acc = float;
  using In = __m512;
  using Vec = __m512;
  using Square = Square16;
  static constexpr int kWidth = 16, kVectors = 4, kPair = 1;

  static Vec load(const float* at) { return _mm512_loadu_ps(at); }
  static Vec load_f16(const uint16_t* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  }
  // Convert 32 elements of bfloat16: those at even positions to to[0], those at odd positions to to[1].
  static LOCO_INLINE void split(const uint16_t* at, Vec (&to)[2]) {
    __m512i pairs = _mm512_loadu_si512(at);
    asm("" : "+v"(pairs));  // otherwise the compiler would load it twice
    to[0] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    to[1] = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static LOCO_INLINE void join(const Vec (&from)[2], uint16_t* at) {
    const __m512i even = _mm512_srli_epi32(rounded(from[0]), 16), odd = rounded(from[1]);
    _mm512_storeu_si512(at, _mm512_mask_mov_epi16(even, 0xaaaaaaaa, odd));
  }
  // Round to bfloat16. The results are in the upper halves of the words; the lower halves are undefined. A NaN becomes
  // quiet.
  static LOCO_INLINE __m512i rounded(Vec value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
  }
  static void store(float* at, Vec value) { _mm512_storeu_ps(at, value); }
  static In words(const float* at) { return _mm512_loadu_ps(at); }
  static In broadcast(const char* at) { return _mm512_set1_ps(*reinterpret_cast<const float*>(at)); }
  static Vec multiply_add(In a, In b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static LOCO_INLINE void totals(const Vec (&of)[4], float* to) { _mm_storeu_ps(to, four_totals(of)); }
  static LOCO_INLINE __m128 four_totals(const Vec (&of)[4]) {
    // First sum pairs of lanes, of vectors 0 and 1 and of 2 and 3 interleaved; then sum four lanes of each vector, in
    // the order of `of`.
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(of[0], of[1]), _mm512_unpackhi_ps(of[0], of[1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(of[2], of[3]), _mm512_unpackhi_ps(of[2], of[3]));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }
};

struct Double {
  using Word = double;
  using Acc = double;
  using In = __m512d;
  using Vec = __m512d;
  using Square = PlainSquare<Double>;
  static constexpr int kWidth = 8, kVectors = 4, kPair = 1;

  static Vec load(const double* at) { return _mm512_loadu_pd(at); }
  static void store(double* at, Vec value) { _mm512_storeu_pd(at, value); }
  static In words(const double* at) { return _mm512_loadu_pd(at); }
  static In broadcast(const char* at) { return _mm512_set1_pd(*reinterpret_cast<const double*>(at)); }
  static Vec multiply_add(In a, In b, Vec c) { return _mm512_fmadd_pd(a, b, c); }
  static LOCO_INLINE void totals(const Vec (&of)[4], double* to) {
    LOCO_UNROLL for (int i = 0; i < 4; ++i) to[i] = _mm512_reduce_add_pd(of[i]);
  }
};

}  // namespace loco::block_sparse::v4
