// What the kernels of a call read beside its weights, as one stretch of bytes that is copied to the GPU.
//
// A block works on a kernel's weights in *ring order*: ring after ring, the outermost first; in a ring as they lie in
// memory, taps fastest or channels fastest.
#pragma once

#include <cstdint>
#include <vector>

#include "ring_prox/cuda.h"

namespace loco::ring_prox {

constexpr unsigned kMostThreads = 256;     // of a block
constexpr int64_t kMostStaged = 40 << 10;  // bytes of weights and metrics that it brings into shared memory

// How many threads work on a kernel: the fewest warps whose threads have few enough weights each.
unsigned threads_for(const Shape& shape);

enum OperandOf { kWeight, kMetric, kOut, kOperands };

struct Tap {
  uint32_t begin, step;  // channel c is number begin + c * step in ring order
  int32_t ring;
  int32_t ordered;  // the tap whose rank, counted ring after ring, is this entry's number
};

struct RingOrder {
  std::vector<Tap> taps;
  std::vector<uint32_t> begins;  // [rings + 1], of each ring's first weight
};

RingOrder ring_order(const Shape& shape);

// In elements, of a tap's channel 0.
struct Offsets {
  int64_t of[kOperands];
};

struct GpuTable {
  std::vector<unsigned char> bytes;  // as many as a multiple of 16
  // Where sections begin among the bytes: Offsets and Tap of each tap, begins of the ring order, t and q of math.h;
  // those that there are.
  int64_t offsets, taps, begins, plain, squared;
};

GpuTable build(const CudaCall& call);

// Whether the weights of a kernel lie side by side in the order in which the call walks them.
bool is_flat(const Placed& operand, const Shape& shape);

}  // namespace loco::ring_prox
