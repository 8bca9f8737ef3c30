// The tables that CUDA kernels read besides the weights, as one byte buffer that is copied to the GPU.
//
// A block works on a filter's weights in *ring order*: ring after ring, the outermost first; within a ring in memory
// order, taps fastest or channels fastest.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "common/platform.h"
#include "ring_prox/cuda.h"

namespace loco::ring_prox {

constexpr unsigned kMostThreads = 256;     // per block
constexpr int64_t kMostStaged = 40 << 10;  // bytes of shared memory for a filter and its solver

constexpr int64_t kAlignment = 16;  // of a table's sections, in bytes

// Append a section of `count` values to the bytes, padded to kAlignment, and return its offset.
template <typename T>
int64_t append(std::vector<unsigned char>& bytes, const T* values, int64_t count) {
  const auto begin = static_cast<int64_t>(bytes.size());
  const int64_t size = count * static_cast<int64_t>(sizeof(T));
  bytes.resize(begin + (size + kAlignment - 1) / kAlignment * kAlignment);
  if (size > 0) std::memcpy(bytes.data() + begin, values, size);
  return begin;
}

// Return the number of threads per filter: the fewest warps that leave each thread few enough weights.
unsigned threads_for(const Shape& shape);

// Return the bytes of shared memory of a solver that depend on the number of rings: the arrays of SharedArrays.
LOCO_HD int64_t solver_bytes(int rings, bool is_double, bool in_metric) {
  constexpr int64_t kArrays = 17;
  return is_double || !in_metric ? 0 : (kArrays * static_cast<int64_t>(sizeof(double)) * rings + 15) / 16 * 16;
}

enum OperandOf { kWeight, kMetric, kOut, kOperands };

struct Tap {
  uint32_t begin, step;  // channel c has index begin + c * step in ring order
  int32_t ring;
  int32_t ordered;  // the tap whose rank in ring order is this entry's index
};

struct RingOrder {
  std::vector<Tap> taps;
  std::vector<uint32_t> begins;  // [rings + 1], index of each ring's first weight
};

RingOrder ring_order(const Shape& shape);

// Offsets of a tap's channel 0 in each operand, in elements.
struct Offsets {
  int64_t of[kOperands];
};

struct GpuTable {
  std::vector<unsigned char> bytes;  // size is a multiple of 16
  // Byte offsets of the sections: Offsets and Tap [taps], begins of the ring order [rings + 1], t and q of math.h
  // [filters or 1, rings]. Only the sections that the call needs are present: thresholds on the device are not copied.
  int64_t offsets, taps, begins, plain, squared;
};

GpuTable build(const CudaCall& call);

// The tables of several calls, one behind the other, and the state of their searches.
struct JointTable {
  std::vector<unsigned char> bytes;  // size is a multiple of 16
  std::vector<GpuTable> of_calls;
  std::vector<int64_t> begins;  // of each call's table
  int64_t searches, meetings;   // byte offsets of zeros
  int64_t memory;               // bytes that are needed on the GPU: these, and behind them a sum for each filter
};

// Return whether a filter's weights are contiguous in the order in which the call traverses them.
bool is_flat(const Placed& operand, const Shape& shape);

}  // namespace loco::ring_prox
