// What each rule makes of its row of hyper-parameters: the coefficients and scalars of math.h, in float64, rounded once
// to the type that arithmetic is done in.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim_step/math.h"

namespace loco::optim_step {

constexpr int kStates = 3;

enum SgdColumn { kSgdLr, kSgdWeightDecay, kSgdMomentum, kSgdDampening, kSgdColumns };
enum AdamColumn { kAdamLr, kAdamWeightDecay, kAdamBeta1, kAdamBeta2, kAdamEps, kAdamColumns };

// The decay coefficient of a weight, by the decay map's value at its place.
struct Coefficients {
  Decay decay;
  double factor;  // the weight decay; times the learning rate if it is decoupled

  LOCO_HD double at(double map) const { return decay == Decay::decoupled ? 1 - factor * map : factor * map; }
};

// What a call says of all its tensors; each rule uses what it knows.
struct Options {
  bool maximize, l1;
  bool nesterov;            // SGD
  bool amsgrad, decoupled;  // Adam
};

struct Sgd {
  using Flags = SgdFlags;
  template <typename T>
  using Scalars = SgdScalars<T>;
  static constexpr int columns = kSgdColumns, states = 1;
  static constexpr bool counts_steps = false;

  LOCO_HD static Coefficients coefficients(const Options& o, const double* row, double) {
    const Decay kind = o.l1 ? Decay::l1 : Decay::l2;
    return {row[kSgdWeightDecay] == 0 ? Decay::none : kind, row[kSgdWeightDecay]};
  }
  // buffer: there is one; first: it is to be written, not read.
  LOCO_HD static Flags flags(const Options& o, Decay decay, bool buffer, bool first) {
    return {decay, !buffer ? Momentum::none : first ? Momentum::first : Momentum::next, o.nesterov};
  }
  // The prox that ends a step has thresholds this many times those for a step of 1: so that a weight that has come to
  // rest is at the minimum, momentum has to be made up for.
  static constexpr bool has_metric = false;
  LOCO_HD static double prox_step(const double* row, double lr, bool buffer) {
    return buffer ? lr * (1 - row[kSgdDampening]) / (1 - row[kSgdMomentum]) : lr;
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
  static constexpr bool counts_steps = true;

  LOCO_HD static Coefficients coefficients(const Options& o, const double* row, double lr) {
    const Decay kind = o.decoupled ? Decay::decoupled : o.l1 ? Decay::l1 : Decay::l2;
    const double factor = o.decoupled ? lr * row[kAdamWeightDecay] : row[kAdamWeightDecay];
    return {row[kAdamWeightDecay] == 0 ? Decay::none : kind, factor};
  }
  LOCO_HD static Flags flags(const Options& o, Decay decay, bool, bool) { return {decay, o.amsgrad}; }
  // The prox that ends a step is in the metric (sqrt(v / (1-b2^t)) + eps) / lr, with the thresholds for a step of 1;
  // all of it times lr, the metric is what the update divides by.
  static constexpr bool has_metric = true;
  LOCO_HD static double prox_step(const double*, double lr, bool) { return lr; }
  // step: the number of this step, from 1.
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
