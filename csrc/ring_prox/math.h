// The exact prox of a chain of nested groups for one filter (one output channel's weights), from sums over its rings.
//
//   minimise  1/2 sum_i d_i (x_i - u_i)^2 + sum_n t_n ||x(G_n)|| + (sum_n q_n ||x(G_n)||)^2
//
// where G_n = rings 0..n and ring 0 is the outermost. Without q:
//
// l2    Groups are shrunk one after the other, smallest first: a = sqrt(b^2 + rho_n^2), f_n = 1 - t_n/a, or 0 where
//       a <= t_n, b = f_n a; rho_n is the norm of ring n. Ring r is multiplied by the product of f_n over n >= r
//       (Jenatton et al. 2010).
// l2 in a metric d   That chain on d*u tells which groups vanish; metric.h solves for the others.
// linf  Groups are clipped one after the other, smallest first, at the level where sum d max(|x| - level, 0) = t_n, but
//       not below the largest weight with an infinite metric.
//
// With q, x is the prox without q and with thresholds t + f q, where f = 2 sum_n q_n ||x(G_n)|| at x; f is the root of
// a rising function.
//
// All arrays here are contiguous float64 [rings], and all code is scalar: one CPU thread or one CUDA block runs it for
// one filter. Sums over the weights are computed by the caller, who knows the weights' layout and the threads to sum
// on. Instead of a pointer, the caller may pass any array-like object for results to be written to.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/platform.h"

namespace loco::ring_prox {

constexpr int kMaxRings = 64;
constexpr int kMostTrials = 200;  // iterations of a search, at most
constexpr int kMostNewton = 24;   // iterations before bisection steps are mixed in
constexpr double kInfinity = __builtin_huge_val();

LOCO_HD bool is_nan(double value) { return value != value; }

template <typename T>
constexpr T kLargest = sizeof(T) == 8 ? static_cast<T>(__DBL_MAX__) : static_cast<T>(__FLT_MAX__);

// Return d, with infinity, which fixes a weight, replaced by kLargest, so that it can be multiplied and divided by.
template <typename T>
LOCO_HD T finite_metric(T d) {
  return d > kLargest<T> ? kLargest<T> : d;
}

// Powers of two that a filter's weights and metric are multiplied by so that sums of their products neither vanish nor
// overflow.
struct Scale {
  double weight = 1, metric = 1;

  // Return a threshold scaled as products of weight and metric are.
  LOCO_HD double of_threshold(double t) const {
    const double low = weight < metric ? weight : metric, high = weight < metric ? metric : weight;
    return t > 1 ? t * low * high : t * high * low;
  }
};

// Return the power of two that brings a magnitude near 1, or 1 if there is none.
LOCO_HD double near_one(double size) {
  if (!(size > 0) || size == kInfinity) return 1;
  int exponent;
  std::frexp(size, &exponent);
  return std::ldexp(1.0, exponent < -1020 ? 1020 : exponent > 1020 ? -1020 : -exponent);
}

// The thresholds of one filter, [rings]: one for each group.
struct Thresholds {
  const double *plain, *squared;  // t and q; squared may be null: all zeros
};

// Write out = scale * (t + factor q). Where q is 0, out is scale * t even if the factor is infinite.
LOCO_HD void merge(const Thresholds& thresholds, int rings, double factor, double scale, double* out) {
  LOCO_NO_UNROLL
  for (int n = 0; n < rings; ++n) {
    const double q = thresholds.squared && thresholds.squared[n] != 0 ? factor * thresholds.squared[n] : 0;
    out[n] = (thresholds.plain[n] + q) * scale;
  }
}

// Write the factor of each ring, from squares[r], its sum of squares. Return the first ring that does not vanish.
LOCO_HD int chain(const double* squares, const double* t, int rings, double* factors) {
  double b = 0;
  int first = 0;
  LOCO_NO_UNROLL
  for (int n = 0; n < rings; ++n) {
    const double a = std::sqrt(b * b + squares[n]);
    if (t[n] == 0 || a == kInfinity) {
      b = a;
      factors[n] = 1;
    } else if (a <= t[n]) {
      b = 0;
      factors[n] = 0;
      first = n + 1;
    } else {
      b = a - t[n];
      factors[n] = b / a;
    }
  }
  LOCO_NO_UNROLL
  for (int n = rings - 2; n >= 0; --n) factors[n] *= factors[n + 1];
  return first;
}

// Return sum_n q_n ||x(G_n)|| where ring r of x has the sum of squares factors[r]^2 squares[r]. factors may be null:
// all ones.
LOCO_HD double l2_penalty(const double* squares, const double* factors, const double* q, int rings) {
  double sum = 0, penalty = 0;
  LOCO_NO_UNROLL
  for (int n = 0; n < rings; ++n) {
    const double factor = factors ? factors[n] : 1;
    if (factor != 0) sum += factor * factor * squares[n];
    if (q[n] != 0) penalty += q[n] * std::sqrt(sum);
  }
  return penalty;
}

// Finds where a continuous function changes its sign between lower and upper: by one linear interpolation, then by
// inverse quadratic interpolation where that is safe and bisection elsewhere (Chandrupatla 1997). The caller passes the
// function's value at at() to take() until that returns true.
class RootSearch {
 public:
  RootSearch() = default;
  LOCO_HD RootSearch(double lower, double f_lower, double upper, double f_upper)
      : x1_(upper), f1_(f_upper), x2_(lower), f2_(f_lower), part_(f_upper / (f_upper - f_lower)) {}

  LOCO_HD double at() const { return x1_ + part_ * (x2_ - x1_); }
  LOCO_HD double best() const { return f1_ != 0 && std::fabs(f2_) < std::fabs(f1_) ? x2_ : x1_; }

  // Record the value at at(). Return whether best() has been found.
  LOCO_HD bool take(double f_x, double tolerance) {
    const double x = at();
    double x3 = x1_, f3 = f1_;
    if ((f_x > 0) != (f1_ > 0)) {
      x3 = x2_, f3 = f2_;
      x2_ = x1_, f2_ = f1_;
    }
    x1_ = x, f1_ = f_x;
    const double least = tolerance * std::fabs(best()) / std::fabs(x2_ - x1_);
    if (f_x == 0 || !(least <= 0.5)) return true;
    const double xi = (x1_ - x2_) / (x3 - x2_), phi = (f1_ - f2_) / (f3 - f2_);
    part_ = 0.5;
    if (phi * phi < xi && (1 - phi) * (1 - phi) < 1 - xi) {
      part_ =
          f1_ / (f2_ - f1_) * (f3 / (f2_ - f3)) + (x3 - x1_) / (x2_ - x1_) * (f1_ / (f3 - f1_)) * (f2_ / (f3 - f2_));
    }
    part_ = part_ < least ? least : part_ > 1 - least ? 1 - least : part_;
    return false;
  }

 private:
  double x1_, f1_, x2_, f2_, part_;
};

// Sums over the weights that exceed a level: of d |x| (`mass`) and of d (`weight`). `floor` is the largest magnitude of
// a weight whose d is infinite, 0 if there is none; such weights are in neither sum.
struct Above {
  double mass, weight, floor;
};

// Return the level at which weights, all of them above it, have to be clipped to lose t. Rounding must not make it
// negative.
LOCO_HD double level_of(const Above& over, double t) { return over.mass <= t ? 0 : (over.mass - t) / over.weight; }

// Write caps[r], the level at which ring r is clipped. above(n, caps, level) returns Above over rings 0..n, clipped at
// caps.
template <class Sums, class Array>
LOCO_HD void solve_linf(const Sums& above, const double* t, int rings, Array caps) {
  LOCO_NO_UNROLL
  for (int n = 0; n < rings; ++n) {
    caps[n] = kInfinity;
    if (t[n] == 0) continue;
    // Approach the level from below: a weight that does not exceed the level found for more weights cannot exceed the
    // one sought (Michelot 1986).
    Above over = above(n, caps, -1.0);
    caps[n] = over.floor;  // replaced when the level is known
    double level = level_of(over, t[n]);
    while (level > 0 && level < kInfinity) {
      const Above next = above(n, caps, level);
      if (!(next.weight < over.weight) || next.weight == 0) break;
      over = next;
      level = level_of(over, t[n]);
    }
    const double floor = caps[n];
    if (level < floor || is_nan(floor)) level = floor;
    caps[n] = level;
    for (int r = 0; r < n; ++r) caps[r] = level < caps[r] || is_nan(level) ? level : caps[r];
  }
}

// Return sum_n q_n ||x(G_n)||_inf where ring r of u, whose largest magnitude is sizes[r], is clipped at caps[r]. caps
// may be null: nothing is clipped.
LOCO_HD double linf_penalty(const double* sizes, const double* caps, const double* q, int rings) {
  double largest = 0, penalty = 0;
  LOCO_NO_UNROLL
  for (int n = 0; n < rings; ++n) {
    const double size = caps && (sizes[n] > caps[n] || is_nan(caps[n])) ? caps[n] : sizes[n];
    largest = size > largest || is_nan(size) ? size : largest;
    if (q[n] != 0) penalty += q[n] * largest;
  }
  return penalty;
}

// Find the factor f and leave its prox in `found`. solve(factor) finds the prox with thresholds t + factor q and writes
// it to `found`; penalty(found) returns sum_n q_n ||x(G_n)|| there, and penalty(null) that of u.
template <class Solve, class Penalty>
LOCO_HD void solve_squared(const Thresholds& thresholds, const Solve& solve, const Penalty& penalty,
                           const double* found) {
  constexpr double kTolerance = 4e-16;
  const double upper = thresholds.squared ? 2 * penalty(nullptr) : 0;
  double factor = upper == kInfinity ? 0 : upper;
  RootSearch search(0, -1, 1, 1);
  bool last = !(factor > 0);
  for (int i = 0;; ++i) {  // a single call, as `solve` is inlined
    solve(factor);
    if (last) return;
    const double miss = factor - 2 * penalty(found);
    if (i == 0 && !(miss > 0)) return;
    if (i == 0) search = RootSearch(0, -factor, factor, miss);
    last = (i > 0 && search.take(miss, kTolerance)) || i == kMostTrials;
    factor = last ? search.best() : search.at();
  }
}

}  // namespace loco::ring_prox
