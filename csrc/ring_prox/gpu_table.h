// What the kernels of a call read beside its weights, as one stretch of bytes that is copied to the GPU.
//
// A block works on a kernel's weights in *ring order*: ring after ring, the outermost first; in a ring as they lie in
// memory, taps fastest or channels fastest.
#pragma once

#include <cstdint>
#include <vector>

#include "ring_prox/cuda.h"

namespace loco::ring_prox {

enum OperandOf { kWeight, kMetric, kOut, kOperands };

struct Tap {
  int64_t offset[kOperands];  // of channel 0, in elements
  uint32_t begin, step;       // channel c is number begin + c * step in ring order
  int32_t ring;
  int32_t ordered;  // the tap whose rank, counted ring after ring, is this entry's number
};

struct GpuTable {
  std::vector<unsigned char> bytes;  // as many as a multiple of 16
  // Where sections begin among the bytes: [taps], [rings + 1] the number of each ring's first weight in ring order,
  // t and q of math.h; those that there are.
  int64_t taps, begins, plain, squared;
};

GpuTable build(const CudaCall& call);

// Whether the weights of a kernel lie side by side in the order in which the call walks them.
bool is_flat(const Placed& operand, const Shape& shape);

}  // namespace loco::ring_prox
