// A metric and the largest norm need the channels of each tap side by side; a kernel whose taps are fastest is turned
// for them, and its result turned back.
#include "ring_prox/kernel.h"

#include <algorithm>
#include <cmath>

#include "ring_prox/rows.h"

namespace loco::ring_prox {
namespace {

// Sums over the rings of a kernel whose channels lie side by side, for solve_metric. Floats are summed as floats while
// c of the first ring is not much larger than the metric: else its rounding would drown that of the last.
template <typename T>
class RingSums {
 public:
  RingSums(const Shape& shape, const T* u, const T* d, double least) : shape_(shape), u_(u), d_(d), least_(least) {}

  void begin(int first) {
    first_ = first;
    wide_ = sizeof(T) == 8;
  }

  double tolerance() const { return wide_ ? 1e-9 : 1e-5; }

  Damped operator()(int ring, double c) {
    if (ring == first_ && !(c <= kModerate * least_)) wide_ = true;
    Damped all{0, 0};
    for (int k = 0; k < shape_.taps; ++k) {
      if (shape_.ring_of_tap[k] != ring) continue;
      const T *u = u_ + k * shape_.channels, *d = d_ + k * shape_.channels;
      const Damped part = wide_ ? wide_damped_sums(u, d, shape_.channels, c) : damped_sums(u, d, shape_.channels, c);
      all = {all.squares + part.squares, all.slope + part.slope};
    }
    return all;
  }

 private:
  static constexpr double kModerate = 8;

  const Shape& shape_;
  const T *u_, *d_;
  double least_;  // of the metric
  int first_ = 0;
  bool wide_ = true;
};

// [rows, columns] to [columns, rows]
template <typename T>
void turn(const T* from, int64_t rows, int64_t columns, T* to) {
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) to[c * rows + r] = from[r * columns + c];
  }
}

}  // namespace

template <typename T>
KernelSolver<T>::KernelSolver(const Shape& shape) : shape_(shape), by_tap_(shape.taps), factors_(shape.taps) {
  shape_.channels_fastest |= shape.taps == 1;
}

template <typename T>
void KernelSolver<T>::norms(const T* u, double* norms) {
  u_ = u;
  const double scale = scaled_squares(nullptr);
  for (int r = 0; r < shape_.rings; ++r) norms[r] = std::sqrt(squares_[r]) / scale;
}

template <typename T>
void KernelSolver<T>::prox(const T* u, const T* d, const Thresholds& thresholds, bool linf, T* out) {
  u_ = u;
  d_ = d;
  out_ = out;
  const bool turned = !shape_.channels_fastest && (d != nullptr || linf);
  if (!turned) return solve(thresholds, linf);
  turned_u_.resize(shape_.numel());
  turn(u, shape_.channels, shape_.taps, turned_u_.data());
  u_ = out_ = turned_u_.data();
  if (d != nullptr) {
    turned_d_.resize(shape_.numel());
    turn(d, shape_.channels, shape_.taps, turned_d_.data());
    d_ = turned_d_.data();
  }
  shape_.channels_fastest = true;
  solve(thresholds, linf);
  shape_.channels_fastest = false;
  turn(turned_u_.data(), shape_.taps, shape_.channels, out);
}

template <typename T>
void KernelSolver<T>::solve(const Thresholds& thresholds, bool linf) {
  if (linf) return solve_linf(thresholds);
  return d_ != nullptr ? solve_metric(thresholds) : solve_l2(thresholds);
}

template <typename T>
void KernelSolver<T>::solve_l2(const Thresholds& thresholds) {
  double t[kMaxRings], factors[kMaxRings];
  const int rings = shape_.rings;
  const double scale = scaled_squares(nullptr);
  const auto solve = [&](double factor) {
    merge(thresholds, rings, factor, scale, t);
    chain(squares_, t, rings, factors);
  };
  const auto penalty = [&](const double* of) { return l2_penalty(squares_, of, thresholds.squared, rings) / scale; };
  solve_squared(thresholds, solve, penalty, factors);
  if (shape_.channels_fastest) {
    for_taps([&](int64_t at, int r) { multiply(u_ + at, shape_.channels, static_cast<T>(factors[r]), out_ + at); });
  } else {
    for (int k = 0; k < shape_.taps; ++k) factors_[k] = static_cast<T>(factors[shape_.ring_of_tap[k]]);
    multiply_taps(u_, shape_.channels, shape_.taps, factors_.data(), out_);
  }
}

template <typename T>
void KernelSolver<T>::solve_metric(const Thresholds& thresholds) {
  double t[kMaxRings], norms[kMaxRings], weighed[kMaxRings], factors[kMaxRings];
  double coefficients[kMaxRings], derivatives[kMaxRings];
  const int rings = shape_.rings;
  const double scale = scaled_squares(weighed);
  double sum = 0;
  for (int r = 0; r < rings; ++r) norms[r] = std::sqrt(sum += squares_[r]);
  int first = 0;
  RingSums<T> sums{shape_, scaled_, d_, smallest(d_, shape_.numel())};
  const auto solve = [&](double factor) {
    merge(thresholds, rings, factor, scale, t);
    first = chain(weighed, t, rings, factors);
    sums.begin(first);
    ring_prox::solve_metric(sums, norms, t, first, rings, coefficients, derivatives);
  };
  const auto penalty = [&](const double* of) {
    return (of ? metric_penalty(sums, of, thresholds.squared, first, rings)
               : l2_penalty(squares_, nullptr, thresholds.squared, rings)) /
           scale;
  };
  solve_squared(thresholds, solve, penalty, coefficients);
  for_taps([&](int64_t at, int r) {
    if (r < first || coefficients[r] == 0) {
      multiply(u_ + at, shape_.channels, static_cast<T>(r >= first), out_ + at);
    } else {
      damp(u_ + at, d_ + at, shape_.channels, coefficients[r], out_ + at);
    }
  });
}

template <typename T>
void KernelSolver<T>::solve_linf(const Thresholds& thresholds) {
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
  const auto solve = [&](double factor) {
    merge(thresholds, rings, factor, 1, t);
    ring_prox::solve_linf(sums, t, rings, caps);
  };
  if (thresholds.squared) measure(sizes);
  const auto penalty = [&](const double* of) { return linf_penalty(sizes, of, thresholds.squared, rings); };
  solve_squared(thresholds, solve, penalty, caps);
  for_taps([&](int64_t at, int r) { clip(u_ + at, shape_.channels, static_cast<T>(caps[r]), out_ + at); });
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

// Sums the squares of each ring, and of the weights times the metric, if asked for, times a power of two that keeps
// them within float64, and returns that.
template <typename T>
double KernelSolver<T>::scaled_squares(double* weighed) {
  scaled_ = u_;
  sum_squares(false);
  double scale = 1;
  if (!safe()) {
    if constexpr (sizeof(T) == 8) scale = bring_near_one();
    sum_squares(true);
  }
  if (weighed != nullptr) {
    for (int k = 0; k < shape_.taps; ++k) {
      const int64_t at = k * shape_.channels;
      by_tap_[k] = weighed_squares(scaled_ + at, d_ + at, shape_.channels);
    }
    add_by_ring(weighed);
  }
  return scale;
}

// Whether the sums are far from where squares vanish or overflow.
template <typename T>
bool KernelSolver<T>::safe() const {
  constexpr double kLeast = sizeof(T) == 4 ? 1e-28 : 1e-280;
  return std::all_of(squares_, squares_ + shape_.rings, [](double sum) { return sum > kLeast && sum < 1 / kLeast; });
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

template <typename T>
void KernelSolver<T>::sum_squares(bool wide) {
  if (shape_.channels_fastest) {
    for (int k = 0; k < shape_.taps; ++k) {
      const T* x = scaled_ + k * shape_.channels;
      by_tap_[k] = wide ? wide_squares(x, shape_.channels) : squares(x, shape_.channels);
    }
  } else if (wide) {
    wide_tap_squares(scaled_, shape_.channels, shape_.taps, by_tap_.data());
  } else {
    tap_squares(scaled_, shape_.channels, shape_.taps, by_tap_.data());
  }
  add_by_ring(squares_);
}

template <typename T>
void KernelSolver<T>::add_by_ring(double* sums) const {
  for (int r = 0; r < shape_.rings; ++r) sums[r] = 0;
  for (int k = 0; k < shape_.taps; ++k) sums[shape_.ring_of_tap[k]] += by_tap_[k];
}

template class KernelSolver<float>;
template class KernelSolver<double>;

}  // namespace loco::ring_prox
