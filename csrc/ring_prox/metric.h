// The l2 prox in a metric d of a chain of nested groups for one filter; math.h states the problem and tells which rings
// vanish. On the others
//
//   x = u d / (d + c_r),  c_r - c_(r+1) = t_r / ||x(G_r)||,  c = 0 beyond the last ring
//
// solve_metric finds c of the first ring alive by shooting: c beyond the last ring rises with it as long as no c on the
// way is negative, and a negative c shows that it is too small. It takes the sums over each ring from one of two
// sources:
//
// DirectSums   sums over the weights, for each c anew. CUDA blocks use it for weights in float64, and so does the CPU
//              for weights and metrics of extreme magnitudes.
// MetricModel  a model of these sums around values c0 of c at which their moments are known. ModelSearch solves one
//              model after the other, which takes the fewest passes over the weights.
//
// All arrays are contiguous float64 [rings]. One CPU thread or one CUDA block runs this code for one filter.
#pragma once

#include <algorithm>
#include <cmath>

#include "ring_prox/math.h"

namespace loco::ring_prox {

// Return u d / (d + c).
template <typename T>
LOCO_HD double damped(T u, T d, double c) {
  const double weight = d;
  return static_cast<double>(u) * (weight / (weight + c));
}

// Sums over a ring for x = u d / (d + c): of x^2 (`squares`) and of x^2 / (d + c) (`slope`). The derivative of squares
// by c is -2 slope.
struct Damped {
  double squares, slope;
};

// The distance of c beyond the last ring from 0, and its derivative by c of ring `first`.
struct Shot {
  double miss, derivative;
};

// Return a lower bound of c of ring `first`, which holds because no ||x(G_r)|| exceeds that of u. inverses[r] is 1 over
// the norm of u on rings 0..r.
LOCO_HD double least_coefficient(const double* inverses, const double* t, int first, int rings) {
  double least = 0;
  LOCO_NO_UNROLL
  for (int r = first; r < rings; ++r) least += t[r] == 0 ? 0 : t[r] * inverses[r];
  return least;
}

// Follow c from ring `first` to beyond the last ring and return how far it misses 0. sums(r, c) returns Damped of ring
// r, and least is the lower bound of ring `first`. Where c of a ring is below its lower bound, the difference is added
// to the miss, and the recursion continues from the bound. Writes c of each ring and its derivative by c of ring
// `first`.
template <class Sums, class Array>
LOCO_HD Shot shoot(Sums& sums, const double* inverses, const double* t, int first, int rings, double c, double least,
                   Array coefficients, Array derivatives) {
  double squares = 0, slope = 0, derivative = 1;
  Shot lacking{0, 0};
  LOCO_NO_UNROLL
  for (int r = first; r < rings; ++r) {
    if (c < least) {
      lacking = {lacking.miss + (c - least), lacking.derivative + derivative};
      c = least;
      derivative = 0;
    }
    coefficients[r] = c;
    derivatives[r] = derivative;
    const Damped ring = sums(r, c);
    squares += ring.squares;
    slope += ring.slope * derivative;
    if (t[r] == 0 || squares == kInfinity) continue;  // an infinite weight takes the whole pull
    const double inverse = 1 / std::sqrt(squares), pull = t[r] * inverse;
    c -= pull;
    derivative -= pull * (slope * inverse) * inverse;
    least -= t[r] * inverses[r];
  }
  return {c + lacking.miss, derivative + lacking.derivative};
}

// Write c of every ring from `first` on, by Newton's method inside a bracket: if all d of a filter are equal, c beyond
// the last ring is linear in that of the first. sums.tolerance() is the relative size of a step at which to stop; the
// error is about its square. derivatives is scratch, [rings]. start is 0 or a guess of c of the first ring, less than
// twice the solution. uneven: metrics of very different magnitudes may occur in the filter, for which Newton's steps
// alone may stay short for ever. Return the derivative of c beyond the last ring by that of the first, or 0 if there
// was nothing to solve.
template <bool uneven = false, class Sums, class Array>
LOCO_HD double solve_metric(Sums& sums, const double* inverses, const double* t, int first, int rings,
                            Array coefficients, Array derivatives, double start = 0) {
  const double least = least_coefficient(inverses, t, first, rings);
  double lower = least, upper = kInfinity, c = lower;
  if (start > c) c = start;
  if (start / 2 > lower) lower = start / 2;
  if (!(c > 0 && c < kInfinity)) {
    LOCO_NO_UNROLL
    for (int r = first; r < rings; ++r) coefficients[r] = c;
    return 0;
  }
  double step = kInfinity, derivative = 1;
  for (int i = 0; i < kMostTrials && std::fabs(step) > sums.tolerance() * c; ++i) {
    const Shot shot = shoot(sums, inverses, t, first, rings, c, least, coefficients, derivatives);
    (shot.miss < 0 ? lower : upper) = c;
    double next = c - shot.miss / shot.derivative;
    const bool slow = uneven && i >= kMostNewton && i % 2 == 0;
    if (slow || !(shot.derivative > 0 && next >= lower && next <= upper && next < kInfinity)) {
      next = upper < kInfinity ? lower + (upper - lower) / 2 : 2 * c;
      if (slow && upper == kInfinity) next = 0x1p64 * c;
      if (slow && upper < kInfinity && upper > 4 * lower) next = std::sqrt(lower) * std::sqrt(upper);
    }
    derivative = shot.derivative;
    step = next - c;
    c = next;
  }
  LOCO_NO_UNROLL
  for (int r = first; r < rings; ++r) {
    const double found = coefficients[r] + derivatives[r] * step;
    coefficients[r] = found < 0 ? 0 : found;
  }
  return derivative;
}

// Return sum_n q_n ||x(G_n)|| of the x that solve_metric has found.
template <class Sums>
LOCO_HD double metric_penalty(Sums& sums, const double* coefficients, const double* q, int first, int rings) {
  double sum = 0, penalty = 0;
  LOCO_NO_UNROLL
  for (int r = first; r < rings; ++r) {
    sum += sums(r, coefficients[r]).squares;
    if (q[r] != 0) penalty += q[r] * std::sqrt(sum);
  }
  return penalty;
}

// The sums that solve_metric takes, over the weights of a filter. filter.for_ring(ring, visit) calls visit(weight, its
// finite metric) for the weights that this thread is to sum, and filter.add_up(values) adds the values of all threads.
template <class Filter>
struct DirectSums {
  Filter& filter;

  LOCO_HD double tolerance() const { return 1e-9; }

  LOCO_HD Damped operator()(int ring, double c) const {
    double values[2] = {0, 0};
    filter.for_ring(ring, [&](auto u, auto d) {
      const double value = damped(u, d, c);
      values[0] += value * value;
      values[1] += value * value / (static_cast<double>(d) + c);
    });
    filter.add_up(values);
    return {values[0], values[1]};
  }
};

// Sums over each ring for x = u d / (d + c): power(k)[r] = sum x^2 / (d + c)^k.
struct MomentsView {
  const double* sums;
  int stride;

  LOCO_HD const double* power(int k) const { return sums + k * stride; }
};

// Memory of moments: power[k][r].
struct Moments {
  static constexpr int kPowers = 4;
  double power[kPowers][kMaxRings];

  void clear(int rings) {
    for (auto& sums : power) std::fill(sums, sums + rings, 0.0);
  }
  MomentsView view() const { return {power[0], kMaxRings}; }
};

// The arrays of a search by models on the CPU. A GPU's block has pointers to shared memory under the same names.
struct ModelArrays {
  double c0[kMaxRings];                                // where moments are to be summed
  Moments sums;                                        // these moments
  double coefficients[kMaxRings], squares[kMaxRings];  // the result: c of each ring, and its remaining sum of squares
  double pole[kMaxRings], moving[kMaxRings], derivatives[kMaxRings];  // scratch

  MomentsView moments() const { return sums.view(); }
};

// A model of the sums over a ring for values of c other than c0, at which the moments are known.
//
// The sum ||x||^2 is an integral of (1 + (c - c0) i)^-2 over a measure of i = 1 / (d + c0). By Gauss-Radau quadrature
// with a node at 0, it is modelled as
//
//   fixed + moving / (1 + (c - c0) pole)^2,  pole = bend / slope,  moving = slope^2 / bend,  fixed = square - moving
//
// The model has the right value and two derivatives at c0, is exact if all d are equal, and is nowhere too small beyond
// c0. So from c0 = 0 the solutions of successive models rise to the one sought, and each step cubes the error.
template <class Arrays>
class MetricModel {
 public:
  // Model the rings from `first` on. The moments were taken at arrays.c0; for tolerance see solve_metric.
  LOCO_HD MetricModel(MomentsView moments, Arrays& arrays, int first, int rings, double tolerance)
      : moments_(moments), arrays_(arrays), tolerance_(tolerance) {
    LOCO_NO_UNROLL
    for (int r = first; r < rings; ++r) {
      const double slope = moments.power(1)[r], bend = moments.power(2)[r], square = moments.power(0)[r];
      const bool bends = bend > 0 && square < kInfinity;
      arrays.pole[r] = bends ? bend / slope : 0;
      const double moving = bends ? slope * slope / bend : 0;
      arrays.moving[r] = moving < square ? moving : square;
    }
  }

  LOCO_HD double tolerance() const { return tolerance_; }

  LOCO_HD Damped operator()(int r, double c) const {
    const double c0 = arrays_.c0[r], pole = arrays_.pole[r], moving = arrays_.moving[r];
    const double step = c < c0 / 2 ? -c0 / 2 : c - c0;  // the model has a pole far below c0
    const double factor = 1 / (1 + step * pole), moved = moving * factor * factor;
    return {moments_.power(0)[r] - moving + moved, moved * pole * factor};
  }

  // Return the error of a sum, relative to the sum at c0: the first term of Taylor's series that the model lacks, plus
  // the error of the derivative, which is relatively off by `rounding`.
  LOCO_HD double error(int r, double c, double rounding) const {
    const double step = std::fabs(c - arrays_.c0[r]);
    const double off = 4 * step * step * step * moments_.power(3)[r] + 2 * rounding * step * moments_.power(1)[r];
    return off > 0 ? off / moments_.power(0)[r] : 0;
  }

 private:
  MomentsView moments_;
  Arrays& arrays_;
  double tolerance_;
};

// Return whether the sums of rings from `first` on are far from where squares of T vanish or overflow.
template <typename T>
LOCO_HD bool are_safe(const double* sums, int first, int rings) {
  constexpr double kLeast = sizeof(T) == 4 ? 1e-28 : 1e-280;
  bool all = true;
  LOCO_NO_UNROLL
  for (int r = first; r < rings; ++r) all &= sums[r] > kLeast && sums[r] < 1 / kLeast;
  return all;
}

// Finds c of each ring by solving one model after the other. It needs sums over the weights between two models, which
// the caller makes, on as many threads as it has:
//
//   bool more = search.begin(...);
//   do {
//     if (more) sum arrays.moments() for c = arrays.c0;
//   } while (more = search.next(...));
//
// Weights of float are summed in float32 (not wide()) as long as the error of that moves no weight by much more than
// rounding does. T: float or double. Arrays: as ModelArrays, the same in each call.
template <typename T>
class ModelSearch {
 public:
  // Begin with the moments for c = 0. Return whether next() needs moments for arrays.c0 first.
  template <class Arrays>
  LOCO_HD bool begin(MomentsView zero, Arrays& arrays, const double* inverses, const double* t, int first, int rings) {
    solved_ = 0;
    from_zero_ = true;
    LOCO_NO_UNROLL
    for (int r = first; r < rings; ++r) from_zero_ &= zero.power(3)[r] < kInfinity;
    wide_ = sizeof(T) == 8 || !are_safe<T>(zero.power(3), first, rings);
    LOCO_NO_UNROLL
    for (int r = 0; r < rings; ++r) {
      arrays.c0[r] = r < first || from_zero_ ? 0 : least_coefficient(inverses, t, r, rings);
    }
    return !from_zero_;
  }

  // Solve a model. Return whether another one has to be solved, with moments for arrays.c0.
  template <class Arrays>
  LOCO_HD bool next(MomentsView zero, Arrays& arrays, const double* inverses, const double* t, int first, int rings) {
    const bool at_zero = solved_ == 0 && from_zero_;
    const MomentsView moments = at_zero ? zero : arrays.moments();
    if (!at_zero && !wide_ &&
        !(are_safe<T>(moments.power(0), first, rings) && are_safe<T>(moments.power(3), first, rings))) {
      return wide_ = true;
    }
    return solve(moments, arrays, inverses, t, first, rings);
  }

  // Return whether moments are to be summed in float64.
  LOCO_HD bool wide() const { return wide_; }

 private:
  template <class Arrays>
  LOCO_HD bool solve(MomentsView moments, Arrays& arrays, const double* inverses, const double* t, int first,
                     int rings) {
    constexpr int kMostModels = 20;
    constexpr double kAllowed = sizeof(T) == 4 ? 1e-8 : 1e-16, kModerate = 4, kHopeless = 1e3;
    constexpr double kRoughly = 1e-6;   // relative error of sums in float32
    constexpr double kVanished = 1e25;  // beyond this ratio the filter vanishes: rounding resolves nothing smaller
    const MetricModel<Arrays> model(moments, arrays, first, rings, wide_ ? 1e-9 : 3e-5);
    const double derivative =
        solve_metric(model, inverses, t, first, rings, arrays.coefficients, arrays.derivatives, arrays.c0[first]);
    double error = 0, least = kInfinity;
    LOCO_NO_UNROLL
    for (int r = first; r < rings; ++r) {
      const double c = arrays.coefficients[r], of_ring = model.error(r, c, wide_ ? 0 : kRoughly);
      arrays.squares[r] = model(r, c).squares;
      error = of_ring > error ? of_ring : error;
      least = c > 0 && c < least ? c : least;
    }
    if (derivative == 0) return false;
    const double c = arrays.coefficients[first];
    if (wide_ && c > kVanished * least_coefficient(inverses, t, first, rings)) {
      LOCO_NO_UNROLL
      for (int r = first; r < rings; ++r) arrays.coefficients[r] = kInfinity, arrays.squares[r] = 0;
      return false;
    }
    // The relative error of c is half of that of its sum, divided by the derivative, and the relative error of a weight
    // is at most a fourth of that of c.
    const double sensitivity = c / (8 * least * std::fabs(derivative));
    const bool coarse = !wide_ && !(sensitivity <= kModerate);
    if (!coarse && !(error * sensitivity > kAllowed)) return false;
    wide_ |= coarse;
    // If the solution depends on the last digits of the float32 sums, it is far off and no use as a start.
    if (!coarse || sensitivity < kHopeless) {
      LOCO_NO_UNROLL
      for (int r = first; r < rings; ++r) arrays.c0[r] = arrays.coefficients[r];
    }
    return ++solved_ < kMostModels;
  }

  int solved_;
  bool wide_, from_zero_;
};

}  // namespace loco::ring_prox
