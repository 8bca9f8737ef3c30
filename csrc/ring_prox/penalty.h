// A penalty on the nested rings of a weight's filters, as the optimizer step takes it: its thresholds are for a step
// size of 1.
#pragma once

#include <vector>

#include "ring_prox/math.h"

namespace loco::ring_prox {

struct Penalty {
  std::vector<int> ring_of_tap;        // [taps], in the order of a contiguous filter
  std::vector<double> plain, squared;  // [rings], t and q of math.h; squared may be empty
  bool linf;
  bool coupled;  // the squared term is that of the sum over all filters, which are shrunk together

  int rings() const { return static_cast<int>(plain.size()); }
  int taps() const { return static_cast<int>(ring_of_tap.size()); }
};

}  // namespace loco::ring_prox
