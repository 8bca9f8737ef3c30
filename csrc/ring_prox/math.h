// The exact prox of a chain of nested groups, for one kernel (one output channel), from sums over its rings.
//
//   minimise  1/2 sum_i d_i (x_i - u_i)^2 + sum_n t_n ||x(G_n)|| + (sum_n q_n ||x(G_n)||)^2
//
// where G_n = rings 0..n, ring 0 the outermost. Without q:
//
// l2    Groups are shrunk one after the other, smallest first: a = sqrt(b^2 + rho_n^2), f_n = 1 - t_n/a, or 0 where
//       a <= t_n, b = f_n a. Ring r is multiplied by the product of f_n over n >= r (Jenatton et al. 2010).
// l2 in a metric d   Which groups vanish is told by that chain on d*u. On the others x = u d / (d + c_r) with
//       c_r - c_(r+1) = t_r / ||x(G_r)|| and c = 0 beyond the last ring; c of the first ring alive is found by
//       shooting: c beyond the last ring rises with it as long as no c on the way is negative, which tells that it is
//       too small.
// linf  Groups are clipped one after the other, smallest first, at the level where sum d max(|x| - level, 0) = t_n, but
//       not below the largest weight with an infinite metric.
// With q, x is the prox without it and with thresholds t + f q, where f = 2 sum_n q_n ||x(G_n)|| at x: f is the root of
// a rising function.
//
// Everything here is scalar and in float64. Sums over the weights are asked of the caller, who knows how they lie, and
// who may give something else than a pointer for an array that results are written to.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/platform.h"

namespace loco::ring_prox {

constexpr int kMaxRings = 64;
constexpr int kMostTrials = 200;  // of a search
constexpr int kMostNewton = 24;   // of its steps, alone
constexpr double kInfinity = __builtin_huge_val();

LOCO_HD bool is_nan(double value) { return value != value; }

template <typename T>
constexpr T kLargest = sizeof(T) == 8 ? static_cast<T>(__DBL_MAX__) : static_cast<T>(__FLT_MAX__);

// An infinite metric, which lets a weight stay, as a number that it may be multiplied and divided by: kLargest.
template <typename T>
LOCO_HD T finite_metric(T d) {
  return d > kLargest<T> ? kLargest<T> : d;
}

// u d / (d + c)
template <typename T>
LOCO_HD double damped(T u, T d, double c) {
  const double weight = d;
  return static_cast<double>(u) * (weight / (weight + c));
}

// Powers of two that weights and metric of a kernel are multiplied by, so that sums of their products neither vanish
// nor overflow.
struct Scale {
  double weight = 1, metric = 1;

  // A threshold belongs to products of both.
  LOCO_HD double of_threshold(double t) const {
    const double low = weight < metric ? weight : metric, high = weight < metric ? metric : weight;
    return t > 1 ? t * low * high : t * high * low;
  }
};

// The power of two that brings a size near 1; 1 if there is none.
LOCO_HD double near_one(double size) {
  if (!(size > 0) || size == kInfinity) return 1;
  int exponent;
  std::frexp(size, &exponent);
  return std::ldexp(1.0, exponent < -1020 ? 1020 : exponent > 1020 ? -1020 : -exponent);
}

// Of one kernel, for each group.
struct Thresholds {
  const double *plain, *squared;  // t and q; squared may be null: zeros
};

// out = scale * (t + factor q); what is 0 stays 0 where the factor is infinite.
LOCO_HD void merge(const Thresholds& thresholds, int rings, double factor, double scale, double* out) {
  for (int n = 0; n < rings; ++n) {
    const double q = thresholds.squared && thresholds.squared[n] != 0 ? factor * thresholds.squared[n] : 0;
    out[n] = (thresholds.plain[n] + q) * scale;
  }
}

// factors[r]: of ring r, from squares[r], its sum of squares. Returns the first ring that does not vanish.
LOCO_HD int chain(const double* squares, const double* t, int rings, double* factors) {
  double b = 0;
  int first = 0;
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
  for (int n = rings - 2; n >= 0; --n) factors[n] *= factors[n + 1];
  return first;
}

// sum_n q_n ||x(G_n)|| where ring r of x has the sum of squares factors[r]^2 squares[r]; factors may be null: ones.
LOCO_HD double l2_penalty(const double* squares, const double* factors, const double* q, int rings) {
  double sum = 0, penalty = 0;
  for (int n = 0; n < rings; ++n) {
    const double factor = factors ? factors[n] : 1;
    if (factor != 0) sum += factor * factor * squares[n];
    if (q[n] != 0) penalty += q[n] * std::sqrt(sum);
  }
  return penalty;
}

// Where a continuous function changes its sign between lower and upper: bisection, and inverse quadratic interpolation
// where that is safe (Chandrupatla 1997), after a first linear one. To be told the value at at() until found.
class RootSearch {
 public:
  // Until it has begun, at() and best() are x.
  LOCO_HD explicit RootSearch(double x) : x1_(x), f1_(0), x2_(x), f2_(0), part_(0) {}

  LOCO_HD void begin(double lower, double f_lower, double upper, double f_upper) {
    x1_ = upper, f1_ = f_upper, x2_ = lower, f2_ = f_lower;
    part_ = f_upper / (f_upper - f_lower);
  }

  LOCO_HD double at() const { return x1_ + part_ * (x2_ - x1_); }
  LOCO_HD double best() const { return f1_ != 0 && std::fabs(f2_) < std::fabs(f1_) ? x2_ : x1_; }
  // What is known to be at most where a rising function changes its sign.
  LOCO_HD double below() const { return f1_ <= 0 ? x1_ : x2_; }

  // Whether best() has been found.
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

// Sums over a ring for x = u d / (d + c): of x^2, and of x^2 / (d + c), of which -2 is the first one's derivative by c.
struct Damped {
  double squares, slope;
};

// How far c beyond the last ring is from 0, and the derivative of that by c of ring `first`.
struct Shot {
  double miss, derivative;
};

// What c of a ring must be at least, since no ||x(G_r)|| is larger than that of u; norms[r]: of u on rings 0..r.
LOCO_HD double least_coefficient(const double* norms, const double* t, int first, int rings) {
  double least = 0;
  for (int r = first; r < rings; ++r) least += t[r] == 0 ? 0 : t[r] / norms[r];
  return least;
}

// sums(r, c): Damped of ring r. Where c of a ring is less than it must be, that is missed, and the rest goes on from
// what it must be. Writes down c of each ring and its derivative.
template <class Sums, class Array>
LOCO_HD Shot shoot(Sums& sums, const double* norms, const double* t, int first, int rings, double c, Array coefficients,
                   Array derivatives) {
  double squares = 0, slope = 0, derivative = 1, least = least_coefficient(norms, t, first, rings);
  Shot lacking{0, 0};
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
    if (t[r] == 0) continue;
    const double pull = t[r] / std::sqrt(squares);
    c -= pull;
    derivative -= pull * slope / squares;
    least -= t[r] / norms[r];
  }
  return {c + lacking.miss, derivative + lacking.derivative};
}

// Writes c of every ring from `first` on. Newton's method inside a bracket: where all d of a kernel are the same, c
// beyond the last ring is linear in that of the first. sums.tolerance(): of a step, relative, about the square of which
// is the error; derivatives: [rings], for use meanwhile; start: near c of the first ring, and less than twice that, or
// 0. Returns the derivative of c beyond the last ring by that of the first, 0 where nothing had to be solved.
// uneven: metrics of very different sizes may meet in the kernel, where Newton's steps may be short for ever.
template <bool uneven = false, class Sums, class Array>
LOCO_HD double solve_metric(Sums& sums, const double* norms, const double* t, int first, int rings, Array coefficients,
                            Array derivatives, double start = 0) {
  double lower = least_coefficient(norms, t, first, rings), upper = kInfinity, c = lower;
  if (start > c) c = start;
  if (start / 2 > lower) lower = start / 2;
  if (!(c > 0 && c < kInfinity)) {
    for (int r = first; r < rings; ++r) coefficients[r] = c;
    return 0;
  }
  double step = kInfinity, derivative = 1;
  for (int i = 0; i < kMostTrials && std::fabs(step) > sums.tolerance() * c; ++i) {
    const Shot shot = shoot(sums, norms, t, first, rings, c, coefficients, derivatives);
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
  for (int r = first; r < rings; ++r) {
    const double found = coefficients[r] + derivatives[r] * step;
    coefficients[r] = found < 0 ? 0 : found;
  }
  return derivative;
}

// sum_n q_n ||x(G_n)|| of what solve_metric has found.
template <class Sums>
LOCO_HD double metric_penalty(Sums& sums, const double* coefficients, const double* q, int first, int rings) {
  double sum = 0, penalty = 0;
  for (int r = first; r < rings; ++r) {
    sum += sums(r, coefficients[r]).squares;
    if (q[r] != 0) penalty += q[r] * std::sqrt(sum);
  }
  return penalty;
}

// Of the weights that exceed a level: the sums of d |x| and of d, and the largest size of one whose d is infinite, 0 if
// there is none, which is in neither sum.
struct Above {
  double mass, weight, floor;
};

// At which weights, all of them above it, have to be clipped to lose t. Rounding must not take it below 0.
LOCO_HD double level_of(const Above& over, double t) { return over.mass <= t ? 0 : (over.mass - t) / over.weight; }

// caps[r]: at which ring r is clipped. above(n, caps, level): over rings 0..n, clipped at caps.
template <class Sums, class Array>
LOCO_HD void solve_linf(const Sums& above, const double* t, int rings, Array caps) {
  for (int n = 0; n < rings; ++n) {
    caps[n] = kInfinity;
    if (t[n] == 0) continue;
    // From below: what does not exceed the level found for more weights will not exceed the one sought (Michelot 1986).
    Above over = above(n, caps, -1.0);
    caps[n] = over.floor;  // until the level is known
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

// sum_n q_n ||x(G_n)||_inf where ring r of u, whose largest size is sizes[r], is clipped at caps[r]; caps may be null:
// none is.
LOCO_HD double linf_penalty(const double* sizes, const double* caps, const double* q, int rings) {
  double largest = 0, penalty = 0;
  for (int n = 0; n < rings; ++n) {
    const double size = caps && sizes[n] > caps[n] ? caps[n] : sizes[n];
    largest = size > largest || is_nan(size) ? size : largest;
    if (q[n] != 0) penalty += q[n] * largest;
  }
  return penalty;
}

// The search for f of the squared part step by step. To be told sum_n q_n ||x(G_n)|| of the prox with thresholds
// t + at() q until it is found. Where even that for f = 0 is infinite f is 0.
class FactorSearch {
 public:
  LOCO_HD FactorSearch() : root_(0), most_(0), above_(0), miss_above_(0), phase_(Phase::first) {}

  LOCO_HD double at() const { return root_.at(); }
  // At most f, so that not all groups vanish where rounding does not tell f from what would let them.
  LOCO_HD double best() const { return root_.below(); }
  LOCO_HD bool begun() const { return phase_ != Phase::first; }

  // Whether best() has been found.
  LOCO_HD bool take(double penalty, double tolerance) {
    constexpr double kFar = 64;
    const double x = at(), miss = x - 2 * penalty;
    if (phase_ == Phase::within) return root_.take(miss, tolerance);
    if (phase_ == Phase::first) {
      most_ = -miss == kInfinity ? 0 : -miss;
      root_ = RootSearch(most_);
      phase_ = Phase::down;
      return !(most_ > 0);
    }
    // Mostly f is not far from what it is at most, but it may be many powers of 2 below.
    if (2 * penalty * kFar < x) {
      above_ = x, miss_above_ = miss;
      root_ = RootSearch(x / kFar);
      return false;
    }
    phase_ = Phase::within;
    if (miss > 0) {
      root_.begin(0, -most_, x, miss);
      return false;
    }
    if (x < most_) root_.begin(x, miss, above_, miss_above_);
    return !(x < most_);
  }

 private:
  enum class Phase { first, down, within };

  RootSearch root_;
  double most_, above_, miss_above_;
  Phase phase_;
};

// solve(factor) finds the prox with thresholds t + factor q and writes it to `found`; penalty(found): sum_n q_n
// ||x(G_n)|| there, penalty(null): of u.
template <class Solve, class Penalty>
LOCO_HD void solve_squared(const Thresholds& thresholds, const Solve& solve, const Penalty& penalty,
                           const double* found) {
  constexpr double kTolerance = 4e-16;
  double factor = 0;
  if (thresholds.squared) {
    const double upper = 2 * penalty(nullptr);
    const auto miss = [&](double value) {
      solve(value);
      return value - 2 * penalty(found);
    };
    factor = upper == kInfinity ? 0 : upper;
    const double of_upper = factor > 0 ? miss(factor) : 0;
    if (of_upper > 0) {
      RootSearch search(factor);
      search.begin(0, -factor, factor, of_upper);
      for (int i = 0; i < kMostTrials && !search.take(miss(search.at()), kTolerance); ++i) continue;
      factor = search.best();
    }
  }
  solve(factor);
}

}  // namespace loco::ring_prox
