// A model of the sums over a ring, x = u d / (d + c), for values of c other than that at which its moments are known.
//
// The sum ||x||^2 is an integral of (1 + (c - c0) i)^-2 over a measure of i = 1 / (d + c0). By Gauss-Radau quadrature
// with a node at 0, it is modelled as
//
//   held + moving / (1 + (c - c0) pole)^2,  pole = bend / slope,  moving = slope^2 / bend,  held = square - moving
//
// The model has the right value and two derivatives at c0, is exact if all d are equal, and is nowhere too small beyond
// c0. So from c0 = 0 the solutions of successive models rise to the one sought, and each step cubes the error.
#pragma once

#include <algorithm>
#include <cmath>

#include "ring_prox/math.h"
#include "ring_prox/rows.h"

namespace loco::ring_prox {

class MetricModel {
 public:
  // Model the rings from `first` on. c0 is [rings], where the moments were taken; for tolerance see solve_metric.
  MetricModel(const Moments& moments, const double* c0, int first, int rings, double tolerance)
      : moments_(moments), c0_(c0), tolerance_(tolerance) {
    for (int r = first; r < rings; ++r) {
      const double slope = moments.power[1][r], bend = moments.power[2][r], square = moments.power[0][r];
      pole_[r] = bend > 0 ? bend / slope : 0;
      const double moving = bend > 0 ? slope * slope / bend : 0;
      moving_[r] = moving < square ? moving : square;
    }
  }

  double tolerance() const { return tolerance_; }

  Damped operator()(int r, double c) const {
    const double step = c < c0_[r] / 2 ? -c0_[r] / 2 : c - c0_[r];  // the model has a pole far below c0
    const double factor = 1 / (1 + step * pole_[r]), moved = moving_[r] * factor * factor;
    return {moments_.power[0][r] - moving_[r] + moved, moved * pole_[r] * factor};
  }

  // Return the error of a sum, relative to the sum at c0: the first term of Taylor's series that the model lacks, plus
  // the error of the derivative, which is relatively off by `rounding`.
  double error(int r, double c, double rounding) const {
    const double step = std::fabs(c - c0_[r]);
    const double off = 4 * step * step * step * moments_.power[3][r] + 2 * rounding * step * moments_.power[1][r];
    return off > 0 ? off / moments_.power[0][r] : 0;
  }

 private:
  const Moments& moments_;
  const double* c0_;
  double tolerance_;
  double pole_[kMaxRings], moving_[kMaxRings];
};

// Write c of every ring from `first` on by fixed-point iteration, for the usual case that c hardly changes ||x||: first
// from the norms of u, then from the norms of what c leaves of u. The first repetition changes c by some fraction, and
// each further one reduces the error by about that factor, until it is `allowed`. Return that fraction, or 1 if the
// iteration does not converge so or there is nothing to solve.
inline double iterate(const MetricModel& model, const double* norms, const double* t, int first, int rings,
                      double allowed, double* coefficients) {
  double left[kMaxRings], part = 1, most = kInfinity;
  std::copy(norms + first, norms + rings, left + first);
  for (int i = 0;; ++i) {
    double c = 0, change = 0;
    for (int r = rings - 1; r >= first; --r) {
      c += t[r] == 0 ? 0 : t[r] / left[r];
      const double rise = i > 0 && c != 0 ? c / coefficients[r] - 1 : 0;
      change = rise <= change ? change : rise;  // propagates NaN
      coefficients[r] = c;
    }
    if (i == 0 && !(c > 0 && c < kInfinity)) return 1;
    if (!(change <= most)) return 1;
    if (i == 1) part = change;
    if (i > 0) most = change / 2;
    if (i == 1 && !(part * part * part * part < allowed)) return 1;
    if (i > 0 && change * part <= allowed) return part;
    double squares = 0;
    for (int r = first; r < rings; ++r) left[r] = std::sqrt(squares += model(r, coefficients[r]).squares);
  }
}

}  // namespace loco::ring_prox
