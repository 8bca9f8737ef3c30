// Computes the coefficients and scalars of math.h from a rule's row of hyper-parameters. This is done in float64, and
// the results are rounded once to the compute dtype.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim_step/math.h"

namespace loco::optim_step {

constexpr int kStates = 3;  // most states of a rule

// Identifies a rule in a call of the operator.
enum class RuleId : int64_t { sgd, adam };

// Columns of hyper.
enum SgdColumn { kSgdLr, kSgdWeightDecay, kSgdMomentum, kSgdDampening, kSgdColumns };
enum AdamColumn { kAdamLr, kAdamWeightDecay, kAdamBeta1, kAdamBeta2, kAdamEps, kAdamColumns };

// Maps the decay map's value at a weight to the weight's decay coefficient.
struct Coefficients {
  Decay decay;
  double factor;  // weight decay, multiplied by the learning rate if decoupled

  LOCO_HD double at(double map) const { return decay == Decay::decoupled ? 1 - factor * map : factor * map; }
};

// Options that apply to all tensors of a call, in the order of the operator's `flags`. Each rule ignores those of the
// other.
struct Options {
  bool maximize, l1;
  bool nesterov;            // SGD
  bool amsgrad, decoupled;  // Adam
};

// Increments a step counter, one float32 or float64 element, and returns the number of this step.
LOCO_HD double count_step(void* counter, bool is_double) {
  if (is_double) return *static_cast<double*>(counter) += 1;
  const double step = 1 + static_cast<double>(*static_cast<float*>(counter));
  *static_cast<float*>(counter) = static_cast<float>(step);
  return step;
}

struct Sgd {
  using Flags = SgdFlags;
  template <typename T>
  using Scalars = SgdScalars<T>;
  static constexpr int columns = kSgdColumns, states = 1;
  static constexpr const char* state_names[kStates] = {"momentum_buffers", "", ""};
  static constexpr bool counts_steps = false;

  LOCO_HD static Coefficients coefficients(const Options& o, const double* row, double) {
    const Decay kind = o.l1 ? Decay::l1 : Decay::l2;
    return {row[kSgdWeightDecay] == 0 ? Decay::none : kind, row[kSgdWeightDecay]};
  }
  // buffer: whether there is a momentum buffer; first: whether it is written without being read.
  LOCO_HD static Flags flags(const Options& o, Decay decay, bool buffer, bool first) {
    return {decay, !buffer ? Momentum::none : first ? Momentum::first : Momentum::next, o.nesterov};
  }
  // prox_step is the factor on the thresholds of the prox that ends a step, relative to those for a step of 1. It
  // compensates for momentum, so that a weight that has come to rest is at the minimum. It is at least 0, as a schedule
  // may round lr below 0.
  static constexpr bool has_metric = false;
  LOCO_HD static double prox_step(const double* row, double lr, bool buffer) {
    const double step = buffer ? lr * (1 - row[kSgdDampening]) / (1 - row[kSgdMomentum]) : lr;
    return step < 0 ? 0 : step;
  }
  LOCO_HD static Scalars<double> scalars(const double* row, double lr, double) {
    return {lr, row[kSgdMomentum], 1 - row[kSgdDampening]};
  }
  template <typename T>
  LOCO_HD static Scalars<T> as(const Scalars<double>& s) {
    return {static_cast<T>(s.lr), static_cast<T>(s.momentum), static_cast<T>(s.undamped)};
  }
};

struct Adam {
  using Flags = AdamFlags;
  template <typename T>
  using Scalars = AdamScalars<T>;
  static constexpr int columns = kAdamColumns, states = 3;
  static constexpr const char* state_names[kStates] = {"exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"};
  static constexpr bool counts_steps = true;

  LOCO_HD static Coefficients coefficients(const Options& o, const double* row, double lr) {
    const Decay kind = o.decoupled ? Decay::decoupled : o.l1 ? Decay::l1 : Decay::l2;
    const double factor = o.decoupled ? lr * row[kAdamWeightDecay] : row[kAdamWeightDecay];
    return {row[kAdamWeightDecay] == 0 ? Decay::none : kind, factor};
  }
  LOCO_HD static Flags flags(const Options& o, Decay decay, bool, bool) { return {decay, o.amsgrad}; }
  // The prox that ends a step uses the metric (sqrt(v / (1-b2^t)) + eps) / lr with the thresholds for a step of 1. Both
  // are multiplied by lr here, so that the metric is the update's denominator.
  static constexpr bool has_metric = true;
  LOCO_HD static double prox_step(const double*, double lr, bool) { return lr < 0 ? 0 : lr; }
  // step: the number of this step, counted from 1.
  LOCO_HD static Scalars<double> scalars(const double* row, double lr, double step) {
    const double beta1 = row[kAdamBeta1], beta2 = row[kAdamBeta2];
    const double correction1 = 1 - std::pow(beta1, step), correction2 = 1 - std::pow(beta2, step);
    return {1 - beta1, beta2, 1 - beta2, row[kAdamEps], -(lr / correction1), std::sqrt(correction2), 1 - beta1 >= 0.5};
  }
  template <typename T>
  LOCO_HD static Scalars<T> as(const Scalars<double>& s) {
    const T weight = static_cast<T>(s.lerp_weight);
    return {s.lerp_from_end ? weight - 1 : weight,
            static_cast<T>(s.beta2),
            static_cast<T>(s.one_minus_beta2),
            static_cast<T>(s.eps),
            static_cast<T>(s.negative_step_size),
            static_cast<T>(s.bias_correction2_sqrt),
            s.lerp_from_end};
  }
};

}  // namespace loco::optim_step
