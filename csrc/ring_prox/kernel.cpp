// The largest norm needs the channels of each tap side by side; a kernel whose taps are fastest is turned for it, and
// its result turned back.
#include "ring_prox/kernel.h"

#include <algorithm>
#include <cmath>

#include "ring_prox/metric_model.h"
#include "ring_prox/rows.h"

namespace loco::ring_prox {
namespace {

// Of taps, if there are not many: 16 channels of all have a lane each.
constexpr int kFewTaps = 64;
constexpr int kChannelsOfLanes = 16;

// [rows, columns] to [columns, rows]
template <typename T>
void turn(const T* from, int64_t rows, int64_t columns, T* to) {
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) to[c * rows + r] = from[r * columns + c];
  }
}

}  // namespace

template <typename T>
KernelSolver<T>::KernelSolver(const Shape& shape) : shape_(shape) {
  shape_.channels_fastest |= shape.taps == 1;
  divide();
}

// A kernel of one ring is one run, one whose channels are fastest has a run for each row of taps of the same ring, and
// any other one is a run along which rings take turns.
template <typename T>
void KernelSolver<T>::divide() {
  const Shape& s = shape_;
  if (s.rings == 1) {
    parts_.push_back({0, {s.numel(), 0, 0, 1, nullptr, nullptr, nullptr}});
  } else if (s.channels_fastest) {
    for (int k = 0; k < s.taps; ++k) {
      const bool goes_on = k > 0 && s.ring_of_tap[k] == s.ring_of_tap[k - 1];
      const Run run{0, s.ring_of_tap[k], 0, s.rings, nullptr, nullptr, nullptr};
      if (!goes_on) parts_.push_back({k * s.channels, run});
      parts_.back().run.count += s.channels;
    }
  } else {
    const int64_t period = s.taps * (s.taps <= kFewTaps && s.channels >= kChannelsOfLanes ? kChannelsOfLanes : 1);
    for (int64_t l = 0; l < period; ++l) ring_of_lane_.push_back(s.ring_of_tap[l % s.taps]);
    ring_of_long_lane_.assign(ring_of_lane_.begin(), ring_of_lane_.end());
    Run run{s.numel(), 0, period, s.rings, ring_of_lane_.data(), nullptr, nullptr};
    ring_of_lane_.resize(run.stride(), -1);
    ring_of_long_lane_.resize(run.stride(), -1);
    run.ring_of_lane = ring_of_lane_.data();
    lanes_.resize(kLaneSums * run.stride() / 8);
    run.ring_of_long_lane = ring_of_long_lane_.data();
    run.lanes = lanes_.data()->values;
    parts_.push_back({0, run});
  }
}

template <typename T>
void KernelSolver<T>::norms(const T* u, double* norms) {
  turn_to(u, nullptr);
  const double scale = scaled_sums(false);
  for (int r = 0; r < shape_.rings; ++r) norms[r] = std::sqrt(zero_.power[0][r]) / scale;
}

template <typename T>
void KernelSolver<T>::prox(const T* u, const T* d, const Thresholds& thresholds, bool linf, T* out) {
  turn_to(u, d);
  if (!linf) return prox_l2(thresholds, scaled_sums(false), out);
  turn_channels();
  T* const to = turned() ? turned_u_.data() : out;
  with_linf(thresholds, [&](const auto& solve, const auto& penalty, const double* caps) {
    solve_squared(thresholds, solve, penalty, caps);
    for_taps([&](int64_t at, int r) { clip(u_ + at, shape_.channels, static_cast<T>(caps[r]), to + at); });
  });
  if (turned()) turn(to, shape_.taps, shape_.channels, out);
}

template <typename T>
void KernelSolver<T>::sum(const T* u, const T* d) {
  turn_to(u, d);
  scaled_ = u;
  sum_up(false);
}

template <typename T>
void KernelSolver<T>::keep_sums(bool in_metric, double* to) const {
  const int rings = shape_.rings;
  for (int at = 0; at < sum_count(in_metric); at += rings) {
    std::copy(zero_.power[at / rings], zero_.power[at / rings] + rings, to + at);
  }
}

template <typename T>
void KernelSolver<T>::take_sums(bool in_metric, const double* from) {
  const int rings = shape_.rings;
  for (int at = 0; at < sum_count(in_metric); at += rings) {
    std::copy(from + at, from + at + rings, zero_.power[at / rings]);
  }
}

template <typename T>
Moments& KernelSolver<T>::no_sums() {
  zero_.clear(shape_.rings);
  return zero_;
}

template <typename T>
void KernelSolver<T>::prox_of_summed(const T* u, const T* d, const Thresholds& thresholds, T* out) {
  turn_to(u, d);
  prox_l2(thresholds, scaled_sums(true), out);
}

template <typename T>
double KernelSolver<T>::penalty_of_summed(const T* u, const T* d, const Thresholds& thresholds, double factor) {
  turn_to(u, d);
  double result = 0;
  with_l2(thresholds, scaled_sums(true), [&](const auto& solve, const auto& penalty, const double* found) {
    solve(factor);
    result = penalty(found);
  });
  return result;
}

template <typename T>
double KernelSolver<T>::linf_penalty(const T* u, const T* d, const Thresholds& thresholds, double factor) {
  turn_to(u, d);
  turn_channels();
  double result = 0;
  with_linf(thresholds, [&](const auto& solve, const auto& penalty, const double* caps) {
    solve(factor);
    result = penalty(caps);
  });
  return result;
}

// Lets channels be fastest in u and d.
template <typename T>
void KernelSolver<T>::turn_channels() {
  if (!turned()) return;
  turned_u_.resize(shape_.numel());
  turn(u_, shape_.channels, shape_.taps, turned_u_.data());
  u_ = turned_u_.data();
  if (d_ == nullptr) return;
  turned_d_.resize(shape_.numel());
  turn(d_, shape_.channels, shape_.taps, turned_d_.data());
  d_ = turned_d_.data();
}

// scale: what the sums were made with
template <typename T>
void KernelSolver<T>::prox_l2(const Thresholds& thresholds, double scale, T* out) {
  if (d_ == nullptr && thresholds.squared == nullptr) return prox_plain(thresholds, scale, out);
  with_l2(thresholds, scale, [&](const auto& solve, const auto& penalty, double* found) {
    solve_squared(thresholds, solve, penalty, found);
    if (d_ == nullptr) {
      for (const Part& part : parts_) multiply(u_ + part.at, part.run, found, out + part.at);
    } else {
      for (int r = 0; r < first_; ++r) found[r] = kInfinity;
      for (const Part& part : parts_) damp(u_ + part.at, d_ + part.at, part.run, found, out + part.at);
    }
  });
}

// What most steps end with, for one kernel of a few weights after the other.
template <typename T>
void KernelSolver<T>::prox_plain(const Thresholds& thresholds, double scale, T* out) {
  double t[kMaxRings], factors[kMaxRings];
  merge(thresholds, shape_.rings, 0, scale, t);
  chain(zero_.power[0], t, shape_.rings, factors);
  for (const Part& part : parts_) multiply(u_ + part.at, part.run, factors, out + part.at);
}

template <typename T>
template <class Use>
void KernelSolver<T>::with_l2(const Thresholds& thresholds, double scale, const Use& use) {
  if (d_ != nullptr) return with_metric(thresholds, scale, use);
  double t[kMaxRings], factors[kMaxRings];
  const int rings = shape_.rings;
  const double* const squares = zero_.power[0];
  const auto solve = [&](double factor) {
    merge(thresholds, rings, factor, scale, t);
    chain(squares, t, rings, factors);
  };
  const auto penalty = [&](const double* of) { return l2_penalty(squares, of, thresholds.squared, rings) / scale; };
  use(solve, penalty, factors);
}

template <typename T>
template <class Use>
void KernelSolver<T>::with_metric(const Thresholds& thresholds, double scale, const Use& use) {
  double t[kMaxRings], norms[kMaxRings], coefficients[kMaxRings];
  const int rings = shape_.rings;
  double sum = 0;
  for (int r = 0; r < rings; ++r) norms[r] = std::sqrt(sum += zero_.power[0][r]);
  const auto solve = [&](double factor) {
    merge(thresholds, rings, factor, scale, t);
    first_ = first_alive(t);
    find_coefficients(norms, t, first_, coefficients);
  };
  const auto found = [&](int r, double) { return Damped{squares_[r], 0}; };
  const auto penalty = [&](const double* of) {
    return (of ? metric_penalty(found, coefficients, thresholds.squared, first_, rings)
               : l2_penalty(zero_.power[0], nullptr, thresholds.squared, rings)) /
           scale;
  };
  use(solve, penalty, coefficients);
}

// The first ring that does not vanish. By Cauchy and Schwarz (sum u^2)^2 <= sum (d u)^2 sum (u / d)^2, which mostly is
// enough to see that all stay.
template <typename T>
int KernelSolver<T>::first_alive(const double* t) {
  double factors[kMaxRings];
  const int rings = shape_.rings;
  if (!weighed_is_known_) {
    constexpr double kSafely = 0.99;
    bool all = true;
    for (int r = 0; r < rings; ++r) {
      const double square = zero_.power[0][r], bend = zero_.power[2][r];
      weighed_[r] = bend > 0 ? kSafely * square * square / bend : 0;
      all &= weighed_[r] > t[r] * t[r];  // no ring vanishes that is larger than its own threshold
    }
    if (all || chain(weighed_, t, rings, factors) == 0) return 0;
    std::fill(weighed_, weighed_ + rings, 0.0);
    for (const Part& part : parts_) weighed_squares(scaled_ + part.at, d_ + part.at, part.run, weighed_);
    weighed_is_known_ = true;
  }
  return chain(weighed_, t, rings, factors);
}

// c of each ring from `first` on, and into squares_ what that leaves of its sum of squares, by one model after the
// other. Floats are summed as floats while an error of theirs moves no weight by much more.
template <typename T>
void KernelSolver<T>::find_coefficients(const double* norms, const double* t, int first, double* coefficients) {
  constexpr int kMostModels = 20;
  constexpr double kAllowed = sizeof(T) == 4 ? 1e-8 : 1e-16, kModerate = 4, kHopeless = 1e3;
  constexpr double kRoughly = 1e-6;   // how far sums of floats are off
  constexpr double kVanished = 1e25;  // to a part as small as that no rounding lets a kernel shrink without vanishing
  const int rings = shape_.rings;
  double c0[kMaxRings], derivatives[kMaxRings];
  const bool from_zero = finite(zero_, first);
  bool wide = sizeof(T) == 8 || !safe(zero_.power[3], first);
  const auto sum = [&] {
    std::fill(c0, c0 + first, 0.0);
    sum_moments(wide, c0, moments_);
    if (wide || (safe(moments_.power[0], first) && safe(moments_.power[3], first))) return;
    wide = true;
    sum_moments(wide, c0, moments_);
  };
  for (int r = first; r < rings; ++r) c0[r] = from_zero ? 0 : least_coefficient(norms, t, r, rings);
  if (!from_zero) sum();
  for (int i = 0; i < kMostModels; ++i) {
    const MetricModel model(i == 0 && from_zero ? zero_ : moments_, c0, first, rings, wide ? 1e-9 : 3e-5);
    const double part = iterate(model, norms, t, first, rings, kAllowed, coefficients);
    const double derivative =
        part < 1 ? 1 - part
                 : ring_prox::solve_metric(model, norms, t, first, rings, coefficients, derivatives, c0[first]);
    double error = 0, least = kInfinity;
    for (int r = first; r < rings; ++r) {
      const double c = coefficients[r], of_ring = model.error(r, c, wide ? 0 : kRoughly);
      squares_[r] = model(r, c).squares;
      error = of_ring > error ? of_ring : error;
      least = c > 0 && c < least ? c : least;
    }
    if (derivative == 0) return;
    if (wide && coefficients[first] > kVanished * least_coefficient(norms, t, first, rings)) {
      std::fill(coefficients + first, coefficients + rings, kInfinity);
      return std::fill(squares_ + first, squares_ + rings, 0.0);
    }
    // c is off by half of what its sum is, over the derivative, and a weight by no more than a fourth of what c is.
    const double sensitivity = coefficients[first] / (8 * least * std::fabs(derivative));
    const bool coarse = !wide && !(sensitivity <= kModerate);
    if (!coarse && !(error * sensitivity > kAllowed)) return;
    wide |= coarse;
    // What floats have found where it hangs on their last digits is nowhere near.
    if (!coarse || sensitivity < kHopeless) std::copy(coefficients + first, coefficients + rings, c0 + first);
    sum();
  }
}

template <typename T>
template <class Use>
void KernelSolver<T>::with_linf(const Thresholds& thresholds, const Use& use) {
  double t[kMaxRings], caps[kMaxRings], sizes[kMaxRings];
  const int rings = shape_.rings;
  const auto sums = [&](int n, const double* of, double level) {
    Above all{0, 0, 0};
    for_taps([&](int64_t at, int r) {
      if (r > n) return;
      const T* d = d_ ? d_ + at : nullptr;
      const Above part = above(u_ + at, d, shape_.channels, r == n ? kInfinity : of[r], level);
      all = {all.mass + part.mass, all.weight + part.weight, all.count + part.count};
    });
    return all;
  };
  constexpr double kHuge = 1e290;
  // The search begins with all weights; few of them are above a level that one alone would be clipped to.
  const auto fewer_sums = [&](int n, const double* of, double level) {
    if (level >= 0) return sums(n, of, level);
    double least = level;
    for_taps([&](int64_t at, int r) {
      if (r > n) return;
      const T* d = d_ ? d_ + at : nullptr;
      least = std::max(least, least_level(u_ + at, d, shape_.channels, r == n ? kInfinity : of[r], t[n]));
    });
    // Not where a sum of all would overflow, which keeps them from being clipped, as it does on a GPU.
    const Above all = sums(n, of, least < kHuge ? least : level);
    return all.count > 0 ? all : sums(n, of, level);
  };
  const auto solve = [&](double factor) {
    merge(thresholds, rings, factor, 1, t);
    ring_prox::solve_linf(fewer_sums, t, rings, caps);
  };
  if (thresholds.squared) measure(sizes);
  const auto penalty = [&](const double* of) { return ring_prox::linf_penalty(sizes, of, thresholds.squared, rings); };
  use(solve, penalty, caps);
}

// The largest size in each ring.
template <typename T>
void KernelSolver<T>::measure(double* sizes) const {
  for (int r = 0; r < shape_.rings; ++r) sizes[r] = 0;
  for_taps([&](int64_t at, int r) {
    const double size = largest(u_ + at, shape_.channels);
    if (size > sizes[r] || is_nan(size)) sizes[r] = size;
  });
}

// visit(offset of the tap's first channel, its ring), channels fastest.
template <typename T>
template <typename Visit>
void KernelSolver<T>::for_taps(const Visit& visit) const {
  for (int k = 0; k < shape_.taps; ++k) visit(k * shape_.channels, shape_.ring_of_tap[k]);
}

// Sums up the rings, unless that has been done, of weights times a power of two that keeps the sums within float64, and
// returns that.
template <typename T>
double KernelSolver<T>::scaled_sums(bool summed) {
  scaled_ = u_;
  weighed_is_known_ = false;
  if (!summed) sum_up(false);
  if (safe(zero_.power[0], 0)) return 1;
  const double scale = sizeof(T) == 8 ? bring_near_one() : 1;
  sum_up(true);
  return scale;
}

template <typename T>
void KernelSolver<T>::sum_up(bool wide) {
  if (d_ != nullptr) return sum_moments(wide, nullptr, zero_);
  std::fill(zero_.power[0], zero_.power[0] + shape_.rings, 0.0);
  for (const Part& part : parts_) squares(scaled_ + part.at, part.run, wide, zero_.power[0]);
}

template <typename T>
void KernelSolver<T>::sum_moments(bool wide, const double* c, Moments& to) {
  to.clear(shape_.rings);
  for (const Part& part : parts_) moments(scaled_ + part.at, d_ + part.at, part.run, wide, c, to);
}

// Whether sums, of rings from `first` on, are far from where squares vanish or overflow.
template <typename T>
bool KernelSolver<T>::safe(const double* sums, int first) const {
  constexpr double kLeast = sizeof(T) == 4 ? 1e-28 : 1e-280;
  bool all = true;
  for (int r = first; r < shape_.rings; ++r) all &= sums[r] > kLeast && sums[r] < 1 / kLeast;
  return all;
}

template <typename T>
bool KernelSolver<T>::finite(const Moments& moments, int first) const {
  bool all = true;
  for (int r = first; r < shape_.rings; ++r) all &= moments.power[3][r] < kInfinity;
  return all;
}

// Lets scaled_ be u times a power of two, which it returns: 1 where u has no largest size.
template <typename T>
double KernelSolver<T>::bring_near_one() {
  const double size = largest(u_, shape_.numel());
  if (!(size > 0) || size == kInfinity) return 1;
  int exponent;
  std::frexp(size, &exponent);
  const double scale = std::ldexp(1.0, -std::max(-1020, std::min(1020, exponent)));
  scaled_copy_.resize(shape_.numel());
  multiply(u_, shape_.numel(), static_cast<T>(scale), scaled_copy_.data());
  scaled_ = scaled_copy_.data();
  return scale;
}

template class KernelSolver<float>;
template class KernelSolver<double>;

}  // namespace loco::ring_prox
