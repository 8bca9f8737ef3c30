// Multiplication by block-sparse matrices on the CPU, without torch: plain structs in. Strides are in elements. Block
// values are contiguous [blocks, groups, channels in, channels out].
#pragma once

#include <cstdint>

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

}  // namespace loco::block_sparse
