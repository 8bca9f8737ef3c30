// The functions that are compiled for each instruction set. They compute items begin .. end - 1 of a call; what an item
// is stands in the source of each.
#pragma once

#include "block_sparse/cpu.h"
#include "common/capability.h"

namespace loco::block_sparse {

constexpr int64_t kTransposePixels = 64;  // pixels of an item

template <typename Call>
using Range = void (*)(const Call& call, int64_t begin, int64_t end);

// Indexed by DType.
struct ProductKernels {
  struct {
    int64_t (*items)(const Product& call);
    Range<Product> range;
  } of[4];
};

struct GradientKernels {
  Range<ValueGradient> of[4];
};

struct TransposeKernels {
  Range<Transpose> of[4];
};

LOCO_TABLE(ProductKernels, products)
LOCO_TABLE(ProductKernels, depthwise_products)  // blocks of one element
LOCO_TABLE(GradientKernels, value_gradients)
LOCO_TABLE(GradientKernels, depthwise_value_gradients)
LOCO_TABLE(TransposeKernels, transposes)

#ifdef LOCO_ALL_CAPABILITIES
namespace avx512_bf16 {  // these tables have only bfloat16
extern const ProductKernels products;
extern const GradientKernels value_gradients;
}  // namespace avx512_bf16
#endif

}  // namespace loco::block_sparse
