// Multiplication by block-sparse matrices on the CPU, without torch: plain structs in. Strides are in elements; blocks
// are stored as [block][group][channel in][channel out].
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/parallel.h"

namespace loco::block_sparse {

// Activations [batch, pixels, groups * channels of a group]. Channels lie side by side, or else pixels, in what
// products with blocks of one element read.
struct Pixels {
  void* data;
  int64_t batch_stride, pixel_stride, channel_stride;
};

// to[n, r] = bias[r] + sum over the entries j of row r, in their order, of from[n, source[j]] times block(j), which is
// block j as it is, or block blocks[j] transposed where `blocks` is given.
struct Product {
  DType dtype;
  int64_t batch, rows, groups;
  int64_t depth, width;  // channels of a group in `from` and in `to`
  const int64_t* first;  // [rows + 1]: where each row's entries begin
  const int64_t *source, *blocks;
  Pixels from, to;
  const void *values, *bias;  // bias [rows, groups * width], or null
  ParallelFor parallel_for;
};

// values[j] = sum over the batch of from[n, source[j]] (outer product) to[n, row of j], by groups.
struct ValueGradient {
  DType dtype;
  int64_t batch, rows, groups, depth, width;
  const int64_t *first, *source;
  Pixels from, to;
  void* values;
  ParallelFor parallel_for;
};

// to[n, pixel, channel] = from[n, channel, pixel]: images whose pixels lie side by side, by pixel.
struct Turn {
  DType dtype;
  int64_t batch, pixels, channels;
  const void* from;
  int64_t batch_stride, channel_stride;
  void* to;  // contiguous
  ParallelFor parallel_for;
};

void product_cpu(const Product& call);
void value_gradient_cpu(const ValueGradient& call);
void turn_cpu(const Turn& call);

// The instruction sets that the kernels can use on this machine, best first, up to the null that ends them.
const char* const* levels();

// From now on, the kernels of one of levels(), by name; false if there is no such.
bool use_level(const char* name);

}  // namespace loco::block_sparse
