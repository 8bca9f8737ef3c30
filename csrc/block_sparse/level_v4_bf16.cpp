#include "common/platform.h"

#ifdef LOCO_X86_LEVELS
// Headers that other files share come before the pragma: otherwise their inline functions would be compiled for this
// instruction set and used by all files.
#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "common/convert.h"
#include "common/parallel.h"
// GCC 12 gives these warnings for its own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("arch=x86-64-v4,avx512bf16,prefer-vector-width=512")
#include "block_sparse/lanes_v4.h"
#include "block_sparse/level.h"

namespace loco::block_sparse {
namespace v4_bf16 {

// An arithmetic whose words are pairs of bfloat16: it adds the products of both elements to a float32 accumulator.
struct Bf16Pair {
  using Word = uint32_t;
  using Acc = float;
  using In = __m512i;
  using Vec = __m512;
  using Square = v4::Square16;
  static constexpr int kWidth = 16, kVectors = 4, kPair = 2;

  static Vec load(const float* at) { return _mm512_loadu_ps(at); }
  static void store(float* at, Vec value) { _mm512_storeu_ps(at, value); }
  static In words(const uint32_t* at) { return _mm512_loadu_si512(at); }
  static In broadcast(const char* at) {
    int word;
    std::memcpy(&word, at, sizeof word);
    return _mm512_set1_epi32(word);
  }
  // Store a vector rounded to bfloat16, or only its first `count` elements.
  static LOCO_INLINE void store(const float* from, uint16_t* to, int64_t count) {
    const __m512i bits = v4::Float::rounded(_mm512_maskz_loadu_ps(mask_of(count), from));
    _mm256_mask_storeu_epi16(to, mask_of(count), _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
  }
  static LOCO_INLINE __mmask16 mask_of(int64_t count) { return count < kWidth ? (1 << count) - 1 : 0xffff; }
  // Store a vector of words, or only the first `count`, each made of an element of row `low` and one of row `high`, or
  // zero if `high` is null.
  static LOCO_INLINE void pair(const uint16_t* low, const uint16_t* high, int64_t count, uint32_t* to) {
    const __mmask16 mask = mask_of(count);
    __m512i words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, low));
    if (high) {
      words =
          _mm512_or_si512(words, _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, high)), 16));
    }
    _mm512_mask_storeu_epi32(to, mask, words);
  }
  // The conversion treats subnormals as zeros; for sums, multiply_add has already done so.
  static void round(Vec value, uint16_t* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(value));
  }
  static Vec multiply_add(In a, In b, Vec c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
  static LOCO_INLINE void totals(const Vec (&of)[4], uint16_t* to) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), (__m128i)_mm_cvtneps_pbh(v4::Float::four_totals(of)));
  }
};

}  // namespace v4_bf16

const Level kLevelV4Bf16 = {"x86-64-v4 with bf16",
                            [] { return kLevelV4.runs_here() && __builtin_cpu_supports("avx512bf16"); },
                            {{}, {}, kernels_of<Pairs<v4_bf16::Bf16Pair>>(), {}},
                            {},
                            {}};

}  // namespace loco::block_sparse
#endif
