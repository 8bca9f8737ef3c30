// Applies the prox of a ring penalty at the end of a step on the CPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "optim_step/summing_blocks.h"
#include "optim_step/tensor_step.h"
#include "ring_prox/kernel.h"

namespace loco::optim_step {

// Shrinks the filters of one parameter, one at a time. w and metric arguments are [numel] of one filter, contiguous,
// and sums are [sum_count]. T: the compute dtype.
template <class Rule, typename T>
class Shrinkage {
  using Flags = typename Rule::Flags;
  using Scalars = typename Rule::template Scalars<T>;
  // Sums are computed during the update only where that saves 10 % of a step: SGD's need no metric and are cheap.
  static constexpr bool kSums = Rule::has_metric && std::is_same_v<T, float>;

 public:
  Shrinkage(const TensorStep& tensor, const double* row, double lr)
      : penalty_(*tensor.penalty), solver_(shape(tensor)) {
    const double step = Rule::prox_step(row, lr, tensor.state[0].data != nullptr);
    for (int n = 0; n < penalty_.rings(); ++n) {
      plain_[n] = step * penalty_.plain[n];
      if (!penalty_.squared.empty()) squared_[n] = std::sqrt(step) * penalty_.squared[n];
    }
  }

  // Shrinks a filter that has been updated. metric: null if the rule has none.
  void apply(T* w, const T* metric) { solver_.prox(w, metric, thresholds(), false, w); }

  // Updates a filter, then shrinks it. summing: the result of can_sum for the first of a sequence of blocks, each
  // `count` elements after the last.
  void step(const Block<T>& kernel, const Flags& flags, const Scalars& scalars, bool summing) {
    if (!summing) {
      update(kernel, flags, scalars);
      return apply(kernel.w, kernel.metric);
    }
    update_summing(kernel, flags, scalars);
    solver_.prox_of_summed(kernel.w, kernel.metric, thresholds(), kernel.w);
  }

  // Returns whether the filter's sums can be computed while it is updated.
  bool can_sum(const Block<T>& kernel, const Flags& flags, const Scalars& scalars) const {
    bool all = kSums;
    if constexpr (kSums) {
      for (const auto& part : solver_.parts()) all = all && sums_meanwhile(kernel, flags, scalars, part.run);
    }
    return all;
  }

 private:
  void update_summing(const Block<T>& kernel, const Flags& flags, const Scalars& scalars) {
    if constexpr (kSums) {
      ring_prox::Moments& sums = solver_.no_sums();
      for (const auto& part : solver_.parts()) {
        summing_kernels().update_and_sum(kernel.part(part.at, part.run.count), flags, scalars, part.run, sums);
      }
    }
  }

  ring_prox::Thresholds thresholds() const { return {plain_, penalty_.squared.empty() ? nullptr : squared_}; }

  static ring_prox::Shape shape(const TensorStep& tensor) {
    const ring_prox::Penalty& penalty = *tensor.penalty;
    const int64_t channels = tensor.numel / tensor.kernels / penalty.taps();
    return {channels, penalty.taps(), penalty.rings(), penalty.ring_of_tap.data(), tensor.channels_fastest};
  }

  const ring_prox::Penalty& penalty_;
  ring_prox::KernelSolver<T> solver_;
  double plain_[ring_prox::kMaxRings], squared_[ring_prox::kMaxRings];
};

}  // namespace loco::optim_step
