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

// Finds the root of f - 2 S(f), where S is the falling sum over a layer's filters. It lies in global memory, and all of
// its bytes are 0 before the first round.
class JointSearch {
 public:
  // The factor to take the next sum at, or the root once it is found.
  LOCO_DEVICE double factor() const { return factor_; }

  // Whether factor() is the root, and whether the round after that is over, too.
  LOCO_DEVICE bool is_found() const { return phase_ != kSearched; }
  LOCO_DEVICE bool is_over() const { return phase_ == kOver; }
  LOCO_DEVICE void end() { phase_ = kOver; }

  // Take the sum at factor(). precision: relative error of f at which to end. Return whether the root is found.
  LOCO_DEVICE bool take(double sum, double precision) {
    const bool found = find(sum, precision);
    phase_ = found ? kFound : kSearched;
    return found;
  }

 private:
  enum Phase { kSearched, kFound, kOver };

  LOCO_DEVICE bool find(double sum, double precision) {
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

  RootSearch search_;
  double factor_;
  int rounds_;
  Phase phase_;
};

// Wait until all blocks of the grid are here, the given number of times since `arrived` was 0, and one of them has
// called alone(), with all of its threads. is_last: in shared memory.
template <class Alone>
LOCO_DEVICE void meet_grid(unsigned* arrived, unsigned times, bool& is_last, const Alone& alone) {
  const unsigned all = times * (gridDim.x + 1);  // the last block arrives once more when it has called alone()
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(arrived, 1u) + 2 + (LOCO_MISTAKE(joint_meeting) && gridDim.x > 1) == all;
    __threadfence();
  }
  __syncthreads();
  if (is_last) {
    alone();
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    __threadfence();
    if (is_last) atomicAdd(arrived, 1u);
    while (atomicAdd(arrived, 0u) + LOCO_MISTAKE(joint_release) < all) continue;
    __threadfence();
  }
  __syncthreads();
}

}  // namespace loco::ring_prox
