// A filter's weights in memory order and in ring order (gpu_table.h), and how the threads of a block traverse them.
#pragma once

#include <cstdint>

#include "common/gpu_memory.h"
#include "common/mistake.h"
#include "ring_prox/gpu_table.h"
#include "ring_prox/math.h"

namespace loco::ring_prox {

// The rings of one weight tensor, the same for all its filters. The arrays are those of RingOrder.
struct Rings {
  const Tap* taps;
  const uint32_t* begins;
  uint32_t channels, tap_count;
  int count;
  bool channels_fastest;

  LOCO_HD uint32_t numel() const { return channels * tap_count; }
};

// Iterates over a filter's weights in memory order, from weight i on.
class Walk {
 public:
  LOCO_DEVICE Walk(const Rings& rings, uint32_t i)
      : rings_(rings), size_(rings.channels_fastest ? rings.channels : rings.tap_count) {
    outer_ = i / size_;
    inner_ = i - outer_ * size_;
  }
  LOCO_DEVICE void next() {
    if (++inner_ == size_) inner_ = 0, ++outer_;
  }
  LOCO_DEVICE uint32_t channel() const { return rings_.channels_fastest ? inner_ : outer_; }
  LOCO_DEVICE uint32_t tap() const { return rings_.channels_fastest ? outer_ : inner_; }
  LOCO_DEVICE int ring() const { return rings_.taps[tap()].ring; }
  // Return the weight's index in ring order.
  LOCO_DEVICE uint32_t place() const {
    const Tap& tap = rings_.taps[this->tap()];
    return tap.begin + channel() * tap.step;
  }

 private:
  const Rings& rings_;
  uint32_t size_, outer_, inner_;
};

// A filter stored in ring order: in shared memory, or in global memory if it is too large for that.
template <typename T, bool on_chip>
struct Ordered {
  const Rings& rings;
  T *weights, *metrics;  // metrics may be null: all are 1

  LOCO_DEVICE T weight(uint32_t i) const { return on_chip ? weights[i] : in_global(weights)[i]; }
  LOCO_DEVICE T metric(uint32_t i) const {
    return metrics == nullptr ? T(1) : finite_metric(on_chip ? metrics[i] : in_global(metrics)[i]);
  }

  LOCO_DEVICE void put(uint32_t i, T weight, T metric) const {
    (on_chip ? weights : in_global(weights))[i] = weight;
    if (metrics != nullptr) (on_chip ? metrics : in_global(metrics))[i] = metric;
  }

  // Call visit(weight, its metric) for this thread's share of a ring.
  template <class Visit>
  LOCO_DEVICE void for_ring(int ring, const Visit& visit) const {
    const uint32_t end = rings.begins[ring + 1];
    for (uint32_t i = rings.begins[ring] + threadIdx.x; i < end; i += blockDim.x) visit(weight(i), metric(i));
  }
};

// Divides `count` elements from an address on into aligned vectors of 16 bytes, the first of which begins at element
// `head`, and "ends": the elements before and after the vectors, fewer than 16 in all.
struct AlignedSpan {
  uint32_t head, vectors, tail, count;

  LOCO_DEVICE AlignedSpan(const void* data, uint32_t count, uint32_t size) : count(count) {
    const uint32_t width = 16 / size;
    const uint32_t gap = (16 - reinterpret_cast<uintptr_t>(data) % 16) % 16 / size;
    head = gap < count ? gap : count;
    vectors = (count - head) / width;
    tail = head + vectors * width;
  }
  // A span without vectors: its elements are taken one by one.
  LOCO_DEVICE explicit AlignedSpan(uint32_t count) : head(count), vectors(0), tail(count), count(count) {}

  LOCO_DEVICE uint32_t ends() const { return head + count - tail; }
  LOCO_DEVICE uint32_t end(uint32_t k) const { return k < head ? k : tail + k - head + LOCO_MISTAKE(ring_tail); }
};

}  // namespace loco::ring_prox
