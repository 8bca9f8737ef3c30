// The prox of a ring penalty as the last act of a step on the CPU, for kernels that have just been updated.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "optim_step/tensor_step.h"
#include "ring_prox/kernel.h"
#include "ring_prox/rows.h"

namespace loco::optim_step {

// T: the type that arithmetic is done in.
template <class Rule, typename T>
class Shrinkage {
 public:
  Shrinkage(const TensorStep& tensor, const double* row, double lr,
            const typename Rule::template Scalars<double>& scalars, const typename Rule::Flags& flags)
      : tensor_(tensor), scalars_(scalars), flags_(flags), solver_(shape(tensor)) {
    const ring_prox::Penalty& penalty = *tensor.penalty;
    // The metric is left without the division by lr, which its thresholds are multiplied by.
    const double metric_scale = Rule::metric_state(flags) < 0 ? 1 : lr;
    const double step = Rule::prox_step(row, lr, tensor.state[0].data != nullptr) * metric_scale;
    for (int n = 0; n < penalty.rings(); ++n) {
      plain_[n] = step * penalty.plain[n];
      if (!penalty.squared.empty()) squared_[n] = std::sqrt(step) * penalty.squared[n];
    }
  }

  // Of the kernel that begins at element `at`, whose parameter and metric's state are flat and of type T.
  void apply(int64_t at) {
    const ring_prox::Penalty& penalty = *tensor_.penalty;
    const ring_prox::Thresholds thresholds{plain_, penalty.squared.empty() ? nullptr : squared_};
    T* w = static_cast<T*>(tensor_.w.data) + at;
    solver_.prox(w, metric(at), thresholds, penalty.linf, w);
  }

 private:
  static ring_prox::Shape shape(const TensorStep& tensor) {
    const ring_prox::Penalty& penalty = *tensor.penalty;
    const int64_t channels = tensor.numel / tensor.kernels / penalty.taps();
    return {channels, penalty.taps(), penalty.rings(), penalty.ring_of_tap.data(), tensor.channels_fastest};
  }

  const T* metric(int64_t at) {
    const int k = Rule::metric_state(flags_);
    if (k < 0) return nullptr;
    const int64_t numel = tensor_.numel / tensor_.kernels;
    metric_.resize(numel);
    fill_metric(static_cast<const T*>(tensor_.state[k].data) + at, numel, Rule::template as<T>(scalars_));
    return metric_.data();
  }

  void fill_metric(const T* v, int64_t count, const AdamScalars<T>& s) {
    ring_prox::adam_metric(v, count, s.bias_correction2_sqrt, s.eps, metric_.data());
  }
  void fill_metric(const T*, int64_t, const SgdScalars<T>&) {}

  const TensorStep& tensor_;
  typename Rule::template Scalars<double> scalars_;
  typename Rule::Flags flags_;
  ring_prox::KernelSolver<T> solver_;
  std::vector<T> metric_;
  double plain_[ring_prox::kMaxRings], squared_[ring_prox::kMaxRings];
};

}  // namespace loco::optim_step
