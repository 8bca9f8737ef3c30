// Applies the prox of a ring penalty at the end of a step on the CPU.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim_step/tensor_step.h"
#include "ring_prox/filter_solver.h"

namespace loco::optim_step {

// Shrinks the filters of one parameter, one at a time. w and metric arguments are [numel] of one filter, contiguous,
// and sums are [sum_count]. T: the compute dtype.
template <class Rule, typename T>
class Shrinkage {
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
  void apply(T* w, const T* metric) {
    solver_.prox(w, metric, {plain_, penalty_.squared.empty() ? nullptr : squared_}, false, w);
  }

 private:
  static ring_prox::Shape shape(const TensorStep& tensor) {
    const ring_prox::Penalty& penalty = *tensor.penalty;
    const int64_t channels = tensor.numel / tensor.filters / penalty.taps();
    return {channels, penalty.taps(), penalty.rings(), penalty.ring_of_tap.data(), tensor.channels_fastest};
  }

  const ring_prox::Penalty& penalty_;
  ring_prox::FilterSolver<T> solver_;
  double plain_[ring_prox::kMaxRings], squared_[ring_prox::kMaxRings];
};

}  // namespace loco::optim_step
