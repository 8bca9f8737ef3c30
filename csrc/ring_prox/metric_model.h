// What the sums over a ring, x = u d / (d + c), are for other c than those at which its moments are known.
//
// As an integral of (1 + (c - c0) i)^-2 over a measure of i = 1 / (d + c0), ||x||^2 is, by Gauss-Radau quadrature with
// a node at 0,
//
//   held + moving / (1 + (c - c0) pole)^2,  pole = bend / slope,  moving = slope^2 / bend,  held = square - moving
//
// It has the right value and two derivatives at c0, is exact where all d are the same, and is nowhere too small beyond
// c0. So from c0 = 0 the solutions of such models rise to the one sought, and their errors are cubed.
#pragma once

#include <algorithm>
#include <cmath>

#include "ring_prox/math.h"
#include "ring_prox/rows.h"

namespace loco::ring_prox {

class MetricModel {
 public:
  // Of rings from `first` on. c0: by ring; tolerance: see solve_metric.
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
    const double step = c < c0_[r] / 2 ? -c0_[r] / 2 : c - c0_[r];  // far below c0 it has a pole
    const double factor = 1 / (1 + step * pole_[r]), moved = moving_[r] * factor * factor;
    return {moments_.power[0][r] - moving_[r] + moved, moved * pole_[r] * factor};
  }

  // How far a sum is off, relative to that at c0: the first term that Taylor's series has beyond the model, and that of
  // the derivative, which is off by `rounding`.
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

// Writes c of every ring from `first` on where it hardly changes ||x||, as is mostly so: from the norms of u, then
// again from those of what it leaves of u. The first time that changes c by some part of it, and each time the error
// becomes as many times smaller, until it is allowed. Returns that part, or 1 where that does not happen or there is
// nothing to solve.
inline double iterate(const MetricModel& model, const double* norms, const double* t, int first, int rings,
                      double allowed, double* coefficients) {
  double left[kMaxRings], part = 1, most = kInfinity;
  std::copy(norms + first, norms + rings, left + first);
  for (int i = 0;; ++i) {
    double c = 0, change = 0;
    for (int r = rings - 1; r >= first; --r) {
      c += t[r] == 0 ? 0 : t[r] / left[r];
      const double rise = i > 0 && c != 0 ? c / coefficients[r] - 1 : 0;
      change = rise <= change ? change : rise;  // NaN wins
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
