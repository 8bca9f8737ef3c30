// A penalty on the nested rings of a weight's kernels, as the optimizer step takes it: for a step of 1.
#pragma once

#include <vector>

#include "ring_prox/math.h"

namespace loco::ring_prox {

struct Penalty {
  std::vector<int> ring_of_tap;        // in the order of a contiguous kernel
  std::vector<double> plain, squared;  // t and q of math.h; squared may be empty
  bool linf;
  bool coupled;  // what is squared is the sum over all kernels, which are shrunk together

  int rings() const { return static_cast<int>(plain.size()); }
  int taps() const { return static_cast<int>(ring_of_tap.size()); }
};

}  // namespace loco::ring_prox
