// Convolution by filters of different sizes on the CPU, without torch: plain structs in. Strides are in elements.
#pragma once

#include <cstdint>

#include "common/capability.h"
#include "common/dtype.h"
#include "common/parallel.h"

namespace loco::mixed_conv {

// The filters of one size, and the output channels that they compute.
struct Part {
  const void *weight, *bias;  // contiguous [filters, channels in, height, width]; [filters], or null
  int64_t filters, height, width;
  int64_t top, left;        // padding rows and columns before the image; negative: cropped rows and columns
  const int64_t* channels;  // [filters], the output channel of each filter
};

// A batch of images [batch, channels, height, width] in which either the columns of a row or the channels of a pixel
// are contiguous.
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
  int64_t threads;
  ParallelFor parallel_for;
};

void convolve_cpu(const Convolution& call);

// The functions that are compiled for each instruction set.
struct ConvolutionKernels {
  struct {
    int64_t (*items)(const Convolution& call);
    void (*range)(const Convolution& call, int64_t begin, int64_t end);  // computes items begin .. end - 1
  } of[2];                                                               // indexed by DType: float64, float32
};

LOCO_TABLE(avx512, ConvolutionKernels, convolutions)

// Return memory of at least `bytes`, aligned to a cache line, which the thread keeps for its next call.
void* scratch(int64_t bytes);

}  // namespace loco::mixed_conv
