#include "common/platform.h"

#ifdef LOCO_X86_LEVELS
// Headers of others come before the pragma: what they define belongs to all files.
#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "common/convert.h"
#include "common/parallel.h"
// GCC 12 warns of its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("arch=x86-64-v4,avx512bf16,prefer-vector-width=512")
#include "block_sparse/lanes_v4.h"
#include "block_sparse/level.h"

namespace loco::block_sparse {
namespace v4_bf16 {

// Sums in float of products of pairs.
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
  static Vec multiply_add(In a, In b, Vec c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
};

}  // namespace v4_bf16

const Level kLevelV4Bf16 = {"x86-64-v4 with bf16",
                            [] { return kLevelV4.runs_here() && __builtin_cpu_supports("avx512bf16"); },
                            {{}, {}, kernels_of<Pairs<v4_bf16::Bf16Pair>>(), {}},
                            {},
                            {}};

}  // namespace loco::block_sparse
#endif
