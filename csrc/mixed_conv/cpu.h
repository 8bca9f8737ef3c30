// Convolution by kernels of different sizes on the CPU, without torch: plain structs in. Strides are in elements.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/parallel.h"

namespace loco::mixed_conv {

// Kernels of one size, and where their results go.
struct Part {
  const void *weight, *bias;  // contiguous [kernels, channels in, height, width]; [kernels], or null
  int64_t kernels, height, width;
  int64_t top, left;        // rows and columns of zeros before the image; negative: so many of its own are not seen
  const int64_t* channels;  // of the result, one for each kernel
};

// An image batch [batch, channels, height, width]: either the columns of a row or the channels of a pixel lie side by
// side.
struct Images {
  void* data;
  int64_t batch, channels, height, width;
  int64_t batch_stride, channel_stride, row_stride, column_stride;

  bool by_pixel() const { return column_stride != 1; }
};

struct Convolution {
  DType dtype;  // float32 or float64
  Images from, to;
  const Part* parts;
  int64_t count;
  int64_t stride[2], dilation[2];
  const void* add;  // what the results are added to, laid out as they are; or null
  bool relu;        // of these sums
  int64_t threads;
  ParallelFor parallel_for;
};

void convolve_cpu(const Convolution& call);

// Memory that the thread keeps for its next call, at the beginning of a line of the cache.
void* scratch(int64_t bytes);

// The instruction sets that the kernels can use on this machine, best first, up to the null that ends them.
const char* const* levels();

// From now on, the kernels of one of levels(), by name; false if there is no such.
bool use_level(const char* name);

}  // namespace loco::mixed_conv
