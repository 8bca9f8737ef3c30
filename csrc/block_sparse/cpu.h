// Multiplication by block-sparse matrices on the CPU, without torch: plain structs in. Strides are in elements. Block
// values are contiguous [blocks, groups, channels in, channels out].
#pragma once

#include <cstdint>

#include "common/capability.h"
#include "common/dtype.h"
#include "common/parallel.h"

namespace loco::block_sparse {

// Activations [batch, pixels, groups * channels of a group]. channel_stride is 1, except that in inputs of products
// with blocks of one element pixel_stride may be 1 instead.
struct Pixels {
  void* data;
  int64_t batch_stride, pixel_stride, channel_stride;
};

// to[n, r] = bias[r] + sum over the entries j of row r, in their order, of from[n, source[j]] times block(j). block(j)
// is block j as it is, or, if `blocks` is given, block blocks[j] transposed.
struct Product {
  DType dtype;
  int64_t batch, rows, groups;
  int64_t depth, width;  // channels of a group in `from` and in `to`
  const int64_t* first;  // [rows + 1]: index of each row's first entry
  const int64_t *source, *blocks;
  Pixels from, to;
  const void *values, *bias;  // values [blocks, groups, ...]; bias [rows, groups * width], or null
  ParallelFor parallel_for;
};

// values[j] = sum over the batch of the outer products of from[n, source[j]] and to[n, row of j], for each group.
// values is [entries, groups, depth, width]; the other members are as in Product.
struct ValueGradient {
  DType dtype;
  int64_t batch, rows, groups, depth, width;
  const int64_t *first, *source;
  Pixels from, to;
  void* values;
  ParallelFor parallel_for;
};

// to[n, pixel, channel] = from[n, channel, pixel]: transposes images in which pixels have stride 1.
struct Transpose {
  DType dtype;
  int64_t batch, pixels, channels;
  const void* from;
  int64_t batch_stride, channel_stride;
  void* to;  // contiguous [batch, pixels, channels]
  ParallelFor parallel_for;
};

void product_cpu(const Product& call);
void value_gradient_cpu(const ValueGradient& call);
void transpose_cpu(const Transpose& call);

// The functions that are compiled for each instruction set. They compute items begin .. end - 1 of a call; what an item
// is stands in the source of each.

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

LOCO_TABLE(avx512, ProductKernels, products)
LOCO_TABLE(avx512, ProductKernels, depthwise_products)  // blocks of one element
LOCO_TABLE(avx512, GradientKernels, value_gradients)
LOCO_TABLE(avx512, GradientKernels, depthwise_value_gradients)
LOCO_TABLE(avx512, TransposeKernels, transposes)

#ifdef LOCO_ALL_CAPABILITIES
namespace avx512_bf16 {  // these tables have only bfloat16
extern const ProductKernels products;
extern const GradientKernels value_gradients;
}  // namespace avx512_bf16
#endif

}  // namespace loco::block_sparse
