// The prox of a ring penalty as the last act of a step on the CPU, for kernels that have just been updated.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "optim_step/staging.h"
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
      : tensor_(tensor), lr_(lr), scalars_(scalars), flags_(flags), solver_(shape(tensor)) {
    const ring_prox::Penalty& penalty = *tensor.penalty;
    const double step = Rule::prox_step(row, lr, tensor.state[0].data != nullptr);
    for (int n = 0; n < penalty.rings(); ++n) {
      plain_[n] = step * penalty.plain[n];
      if (!penalty.squared.empty()) squared_[n] = std::sqrt(step) * penalty.squared[n];
    }
  }

  // w: the weights of the kernel that begins at element `at`; they are replaced.
  void apply(int64_t at, T* w) {
    const ring_prox::Penalty& penalty = *tensor_.penalty;
    const ring_prox::Thresholds thresholds{plain_, penalty.squared.empty() ? nullptr : squared_};
    solver_.prox(w, metric(at), thresholds, penalty.linf, w);
  }

 private:
  static ring_prox::Shape shape(const TensorStep& tensor) {
    const ring_prox::Penalty& penalty = *tensor.penalty;
    const int64_t channels = tensor.numel / tensor.kernels / penalty.taps();
    return {channels, penalty.taps(), penalty.rings(), penalty.ring_of_tap.data(), tensor.channels_fastest};
  }

  const T* metric(int64_t at) {
    if constexpr (Rule::has_metric) {
      const int64_t numel = tensor_.numel / tensor_.kernels;
      const Operand& v = tensor_.state[flags_.amsgrad ? 2 : 1];
      metric_.resize(numel);
      const T* values = metric_.data();
      if (in_place<T>(v)) {
        values = static_cast<const T*>(v.data) + at;
      } else {
        RawBlock raw;
        for (int64_t i = 0; i < numel; i += kBlock) {
          stage_in(v, at + i, std::min(kBlock, numel - i), metric_.data() + i, raw);
        }
      }
      const auto s = Rule::template as<T>(scalars_);
      ring_prox::adam_metric(values, numel, s.bias_correction2_sqrt, s.eps, static_cast<T>(lr_), metric_.data());
      return metric_.data();
    }
    return nullptr;
  }

  const TensorStep& tensor_;
  double lr_;
  typename Rule::template Scalars<double> scalars_;
  typename Rule::Flags flags_;
  ring_prox::KernelSolver<T> solver_;
  std::vector<T> metric_;
  double plain_[ring_prox::kMaxRings], squared_[ring_prox::kMaxRings];
};

}  // namespace loco::optim_step
