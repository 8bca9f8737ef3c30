// The factor f that the filters of a layer share (math.h: thresholds are t + f q), found by all blocks of a grid, which
// run at the same time.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/mistake.h"
#include "ring_prox/gpu_solve.h"

namespace loco::ring_prox {

// Solves for a given factor, and keeps sum_n q_n ||x(G_n)|| there.
struct GivenFactor {
  double factor;
  double& sum;

  template <class Solve, class Penalty>
  LOCO_DEVICE void operator()(const Solve& solve, const Penalty& penalty, const double* found) const {
    solve(factor);
    sum = penalty(found);
  }
};

// Finds the root of f - 2 S(f), where S is the falling sum over a layer's filters.
class JointSearch {
 public:
  LOCO_DEVICE void begin() { rounds_ = 0, factor_ = 0; }

  // The factor to take the next sum at, or the root once it is found.
  LOCO_DEVICE double factor() const { return factor_; }

  // Take the sum at factor(). precision: relative error of f at which to end. Return whether the root is found.
  LOCO_DEVICE bool take(double sum, double precision) {
    const double miss = factor_ - 2 * sum;
    if (rounds_++ == 0) {
      factor_ = -miss;
      return !(factor_ > 0);
    }
    if (std::fabs(miss) <= precision * factor_) return true;
    if (rounds_ == 2) {
      if (!(miss > 0)) return true;
      search_ = RootSearch(0, -factor_, factor_, miss);
    } else if (search_.take(miss, precision) || rounds_ > kMostTrials) {
      factor_ = search_.best();
      return true;
    }
    factor_ = search_.at();
    return false;
  }

 private:
  RootSearch search_;
  int rounds_;
  double factor_;
};

// Wait for all blocks of the grid, the given number of times since `arrived` was 0.
LOCO_DEVICE void meet_grid(unsigned* arrived, unsigned times) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrived, 1u);
    while (atomicAdd(arrived, 0u) < times * gridDim.x) continue;
    __threadfence();
  }
  __syncthreads();
}

}  // namespace loco::ring_prox
