// Filters, and penalties on them.
#pragma once

#include <cstdint>
#include <vector>

#include "ring_prox/math.h"

namespace loco::ring_prox {

// The shape of a filter and the ring of each of its weights.
struct Shape {
  int64_t channels;
  int taps, rings;
  const int* ring_of_tap;  // [taps], in memory order
  bool channels_fastest;   // whether channels, rather than taps, are fastest in memory

  int64_t numel() const { return channels * taps; }
};

// A penalty on the Euclidean norms of a weight's nested rings, on each filter by itself, as the optimizer step takes
// it: its thresholds are for a step size of 1.
struct Penalty {
  std::vector<int> ring_of_tap;        // [taps], in the order of a contiguous filter
  std::vector<double> plain, squared;  // [rings], t and q of math.h; squared may be empty

  int rings() const { return static_cast<int>(plain.size()); }
  int taps() const { return static_cast<int>(ring_of_tap.size()); }
};

}  // namespace loco::ring_prox
