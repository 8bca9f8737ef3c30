// The functions that are compiled for each instruction set.
#pragma once

#include "common/capability.h"
#include "mixed_conv/cpu.h"

namespace loco::mixed_conv {

struct ConvolutionKernels {
  struct {
    int64_t (*items)(const Convolution& call);
    void (*range)(const Convolution& call, int64_t begin, int64_t end);  // computes items begin .. end - 1
  } of[2];                                                               // indexed by DType: float64, float32
};

LOCO_TABLE(ConvolutionKernels, convolutions)

}  // namespace loco::mixed_conv
