// Elements of products and value gradients with blocks of one element, which are converted as they are read.
#pragma once

#include <type_traits>

#include "block_sparse/panels.h"

namespace loco::block_sparse {
LOCO_KERNELS_BEGIN

// Loads and stores vectors of a dtype's elements, in the arithmetic of T. Unless `whole`, only the first `count`
// elements exist.
template <typename T, DType type>
struct Elements {
  using Arithmetic = Lanes<T>;
  using Vec = typename Arithmetic::Vec;
  using Acc = T;
  static constexpr bool kPlain = type == DType::f64 || type == DType::f32;
  static constexpr int kWidth = Arithmetic::kWidth;
  using Storage = std::conditional_t<kPlain, T, uint16_t>;
  using Square = std::conditional_t<kPlain, typename Arithmetic::Square, PlainSquare>;

  template <bool whole>
  static LOCO_HD Vec read(const Storage* at, int64_t count) {
    Storage some[kWidth] = {};
    if constexpr (!whole) {
      for (int64_t i = 0; i < least(count, kWidth); ++i) some[i] = at[i];
      at = some;
    }
    if constexpr (kPlain) {
      return Arithmetic::load(at);
    } else if constexpr (type == DType::f16) {
      return Arithmetic::load_f16(at);
    } else {
      T wide[kWidth];
      for (int i = 0; i < kWidth; ++i) wide[i] = bf16_to_float(at[i]);
      return Arithmetic::load(wide);
    }
  }

  template <bool whole>
  static LOCO_HD void write(Storage* at, int64_t count, Vec from) {
    if constexpr (whole && kPlain) {
      Arithmetic::store(at, from);
    } else {
      T wide[kWidth];
      Arithmetic::store(wide, from);
      if constexpr (whole) {
        round(wide, at);
      } else {
        store(type, wide, at, least(count, kWidth));
      }
    }
  }

 private:
  // A separate function, so that the compiler recognises the loop.
  __attribute__((noinline)) static void round(const T* from, Storage* to) {
    for (int i = 0; i < kWidth; ++i) to[i] = type == DType::f16 ? float_to_f16(from[i]) : float_to_bf16(from[i]);
  }
};

using F64 = Elements<double, DType::f64>;
using F32 = Elements<float, DType::f32>;
using Bf16 = Elements<float, DType::bf16>;
using F16 = Elements<float, DType::f16>;

LOCO_KERNELS_END
}  // namespace loco::block_sparse
