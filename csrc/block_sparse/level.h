// The kernels of one instruction set.
#pragma once

#include "block_sparse/cpu.h"
#include "block_sparse/product.h"
#include "block_sparse/value_gradient.h"

namespace loco::block_sparse {

// For one element type: how many items a call has, and the work on some of them.
struct Kernels {
  int64_t (*product_items)(const Product&);
  void (*product)(const Product&, int64_t begin, int64_t end);
  void (*value_gradient)(const ValueGradient&, int64_t begin, int64_t end);
};

struct Level {
  const char* name;
  bool (*runs_here)();
  Kernels kernels[4];  // by DType
};

template <typename M>
constexpr Kernels kernels_of() {
  return {product_items<M>, product_range<M>, value_gradient_range<M>};
}

extern const Level kLevelV4Bf16, kLevelV4, kLevelV3, kLevelPortable;

}  // namespace loco::block_sparse
