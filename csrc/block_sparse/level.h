// The table of kernels of one instruction set.
#pragma once

#include "block_sparse/cpu.h"
#include "block_sparse/depthwise_gradient.h"
#include "block_sparse/product.h"
#include "block_sparse/transpose.h"
#include "block_sparse/value_gradient.h"

namespace loco::block_sparse {

// The kernels for one dtype: product_items returns the number of items of a call, and the others compute items begin ..
// end - 1.
struct Kernels {
  int64_t (*product_items)(const Product&);
  void (*product)(const Product&, int64_t begin, int64_t end);
  void (*value_gradient)(const ValueGradient&, int64_t begin, int64_t end);
};

struct Level {
  const char* name;
  bool (*runs_here)();
  // Indexed by DType. Where null, the next level's are used.
  Kernels kernels[4], depthwise[4];
  void (*transpose[4])(const Transpose&, int64_t begin, int64_t end);
};

template <typename M>
constexpr Kernels kernels_of() {
  return {product_items<M>, product_range<M>, value_gradient_range<M>};
}

template <typename E>
constexpr Kernels depthwise_of() {
  return {depthwise_items<E>, depthwise_range<E>, depthwise_gradient_range<E>};
}

// Return the table of an instruction set with arithmetics Double and Float.
template <typename Double, typename Float>
constexpr Level level_of(const char* name, bool (*runs_here)()) {
  return {name,
          runs_here,
          {kernels_of<Plain<Double>>(), kernels_of<Plain<Float>>(), kernels_of<Converted<Float>>(),
           kernels_of<Converted<Float>>()},
          {depthwise_of<Elements<Double, DType::f64>>(), depthwise_of<Elements<Float, DType::f32>>(),
           depthwise_of<Elements<Float, DType::bf16>>(), depthwise_of<Elements<Float, DType::f16>>()},
          {transpose_range<typename Double::Square, double>, transpose_range<typename Float::Square, float>,
           transpose_range<PlainSquare<Float>, uint16_t>, transpose_range<PlainSquare<Float>, uint16_t>}};
}

extern const Level kLevelV4Bf16, kLevelV4, kLevelV3, kLevelPortable;

}  // namespace loco::block_sparse
