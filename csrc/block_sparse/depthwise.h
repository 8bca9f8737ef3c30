// Elements of products and value gradients with blocks of one element, which are converted as they are read, and tiles
// of channels.
#pragma once

#include <type_traits>

#include "block_sparse/panels.h"

namespace loco::block_sparse {
LOCO_KERNELS_BEGIN

// Loads and stores of elements of a dtype as vectors of an arithmetic. Unless `whole`, only the first `count` elements
// exist. Which elements each of two vectors holds depends on the instruction set.
template <typename T, DType type>
struct Elements {
  using A = Lanes<T>;
  using Arithmetic = A;
  using Vec = typename A::Vec;
  using Acc = T;
  using Storage = Stored<type>;
  static constexpr bool kPlain = std::is_same_v<Storage, Acc>;
  using Square = std::conditional_t<kPlain, typename A::Square, PlainSquare>;
  // Vectors in a tile. Half precision, too, takes a whole cache line where there are registers for that.
  static constexpr int kVectors = A::kVectors > 2 && !kPlain ? 2 : 1;

  template <int vectors, bool whole>
  static LOCO_HD void read(const Storage* at, int64_t count, Vec (&to)[vectors]) {
    Storage some[kVectorBytes / sizeof(Storage)];
    if constexpr (!whole) {
      static_assert(vectors == 1);
      copy_some(at, least(count, A::kWidth), some);
      at = some;
      // Without this, GCC 12 would take the vector apart to convert its elements.
      if constexpr (type == DType::bf16) asm("" : "+r"(at) : : "memory");
    }
    if constexpr (type == DType::bf16 && vectors == 2) {
      split_bf16(at, to);
    } else {
      LOCO_UNROLL for (int j = 0; j < vectors; ++j) to[j] = read_vector(at + j * A::kWidth);
    }
  }

  template <int vectors, bool whole>
  static LOCO_HD void write(Storage* at, int64_t count, const Vec (&from)[vectors]) {
    if constexpr (type == DType::bf16 && vectors == 2) {
      join_bf16(from, at);
    } else if constexpr (whole && kPlain) {
      LOCO_UNROLL for (int j = 0; j < vectors; ++j) A::store(at + j * A::kWidth, from[j]);
    } else {
      Acc wide[vectors * A::kWidth];
      LOCO_UNROLL for (int j = 0; j < vectors; ++j) A::store(wide + j * A::kWidth, from[j]);
      store(type, wide, at, whole ? vectors * A::kWidth : least(count, vectors * A::kWidth));
    }
  }

 private:
  static LOCO_HD Vec read_vector(const Storage* at) {
    if constexpr (kPlain) {
      return A::load(at);
    } else if constexpr (type == DType::f16) {
      return A::load_f16(at);
    } else {
      Acc wide[A::kWidth];
      for (int i = 0; i < A::kWidth; ++i) wide[i] = widened<type, Acc>(at[i]);
      return A::load(wide);
    }
  }
};

// Divides channels into tiles of kVectors vectors, and the rest into tiles of one vector.
template <typename E>
struct DepthwiseTiles {
  static constexpr int64_t kWidth = E::Arithmetic::kWidth, kWide = kWidth * E::kVectors;
  int64_t channels, wide, count;

  explicit DepthwiseTiles(int64_t all)
      : channels(all), wide(channels / kWide), count(wide + pieces(channels % kWide, kWidth)) {}
  int64_t channel(int64_t tile) const { return tile < wide ? tile * kWide : wide * kWide + (tile - wide) * kWidth; }
  bool whole(int64_t channel) const { return channel + kWidth <= channels; }
};

using F64 = Elements<double, DType::f64>;
using F32 = Elements<float, DType::f32>;
using Bf16 = Elements<float, DType::bf16>;
using F16 = Elements<float, DType::f16>;

LOCO_KERNELS_END
}  // namespace loco::block_sparse
