#include "ring_prox/rows.h"

#include <algorithm>
#include <cmath>

namespace loco::ring_prox {
namespace {

constexpr int kLanes = 16;
constexpr int kFewTaps = 64;

// Adds up the lanes in a fixed order; what they held is lost.
LOCO_HD double total(double (&lanes)[kLanes]) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  }
  return lanes[0];
}

// sum term(i): term i goes to lane i modulo 16.
template <typename Term>
LOCO_HD double sum_of(int64_t count, const Term& term) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l] += term(i + l);
  }
  for (int l = 0; i + l < count; ++l) lanes[l] += term(i + l);
  return total(lanes);
}

// As many squares as are summed in their own type at a time.
constexpr int kShortSum = 4;

// Part: of short sums; their total is in float64.
template <typename Part, typename T>
LOCO_HD Part square(T x) {
  const Part value = static_cast<Part>(x);
  return value * value;
}

template <typename Part, typename T>
LOCO_HD double squares_of(const T* x, int64_t count) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kShortSum * kLanes <= count; i += kShortSum * kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      Part part = 0;
      for (int k = 0; k < kShortSum; ++k) part += square<Part>(x[i + k * kLanes + l]);
      lanes[l] += static_cast<double>(part);
    }
  }
  for (; i + kLanes <= count; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l] += square<double>(x[i + l]);
  }
  for (int l = 0; i + l < count; ++l) lanes[l] += square<double>(x[i + l]);
  return total(lanes);
}

// With few taps, those of 16 channels have 16 lanes of the sums.
template <typename Part, typename T>
LOCO_HD void tap_squares_of(const T* x, int64_t channels, int taps, double* by_tap) {
  double near[kFewTaps * kLanes];
  const bool few = taps <= kFewTaps && channels >= kLanes;
  double* lanes = few ? near : by_tap;
  const int64_t period = few ? taps * kLanes : taps, count = channels * taps;
  for (int64_t k = 0; k < period; ++k) lanes[k] = 0;
  int64_t i = 0;
  for (; i + kShortSum * period <= count; i += kShortSum * period) {
    for (int64_t k = 0; k < period; ++k) {
      Part part = 0;
      for (int s = 0; s < kShortSum; ++s) part += square<Part>(x[i + s * period + k]);
      lanes[k] += static_cast<double>(part);
    }
  }
  for (; i < count; i += period) {
    const int64_t rest = std::min(period, count - i);
    for (int64_t k = 0; k < rest; ++k) lanes[k] += square<double>(x[i + k]);
  }
  for (int k = 0; few && k < taps; ++k) by_tap[k] = 0;
  for (int64_t l = 0; few && l < period; l += taps) {
    for (int k = 0; k < taps; ++k) by_tap[k] += lanes[l + k];
  }
}

template <typename T>
LOCO_HD double weighed_squares_of(const T* u, const T* d, int64_t count) {
  return sum_of(count, [=](int64_t i) LOCO_INLINE {
    const double value = static_cast<double>(u[i]) * static_cast<double>(d[i]);
    return value * value;
  });
}

template <typename T>
LOCO_HD Damped damped_of(const T* u, const T* d, int64_t count, T c) {
  double squares[kLanes] = {}, slopes[kLanes] = {};
  const auto add = [&](int64_t i, T& square, T& slope) LOCO_INLINE {
    const T inverse = T(1) / (d[i] + c), x = u[i] * d[i] * inverse;
    square += x * x;
    slope += x * x * inverse;
  };
  int64_t i = 0;
  for (; i + kShortSum * kLanes <= count; i += kShortSum * kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      T square = 0, slope = 0;
      for (int k = 0; k < kShortSum; ++k) add(i + k * kLanes + l, square, slope);
      squares[l] += static_cast<double>(square);
      slopes[l] += static_cast<double>(slope);
    }
  }
  for (; i < count; ++i) {
    T square = 0, slope = 0;
    add(i, square, slope);
    squares[i % kLanes] += static_cast<double>(square);
    slopes[i % kLanes] += static_cast<double>(slope);
  }
  return {total(squares), total(slopes)};
}

LOCO_HD Damped wide_damped_of(const float* u, const float* d, int64_t count, double c) {
  double squares[kLanes] = {}, slopes[kLanes] = {};
  const auto add = [&](int64_t i, int l) LOCO_INLINE {
    const double weight = d[i], inverse = 1 / (weight + c), x = u[i] * (weight * inverse);
    squares[l] += x * x;
    slopes[l] += x * x * inverse;
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) add(i + l, l);
  }
  for (int l = 0; i + l < count; ++l) add(i + l, l);
  return {total(squares), total(slopes)};
}

template <typename T>
LOCO_HD double smallest_of(const T* x, int64_t count) {
  T lanes[kLanes];
  for (T& lane : lanes) lane = x[0];
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l] = x[i + l] < lanes[l] ? x[i + l] : lanes[l];
  }
  for (; i < count; ++i) lanes[0] = x[i] < lanes[0] ? x[i] : lanes[0];
  return static_cast<double>(*std::min_element(lanes, lanes + kLanes));
}

template <bool weighed, typename T>
LOCO_HD Above above_of(const T* u, const T* d, int64_t count, double cap, double level) {
  double mass[kLanes] = {}, weight[kLanes] = {}, number[kLanes] = {};
  const auto add = [&](int64_t i, int l) LOCO_INLINE {
    const double size = std::fabs(static_cast<double>(u[i]));
    const double clipped = size > cap ? cap : size;
    const bool over = !(clipped <= level);
    const double w = weighed ? static_cast<double>(d[i]) : 1.0;
    mass[l] += over ? w * clipped : 0.0;
    weight[l] += over ? w : 0.0;
    number[l] += over ? 1.0 : 0.0;
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) add(i + l, l);
  }
  for (int l = 0; i + l < count; ++l) add(i + l, l);
  return {total(mass), total(weight), total(number)};
}

template <typename T>
LOCO_HD double largest_of(const T* x, int64_t count) {
  T lanes[kLanes] = {};
  bool nan = false;
  for (int64_t i = 0; i < count; ++i) {
    const T size = std::fabs(x[i]);
    nan |= size != size;
    lanes[i % kLanes] = size > lanes[i % kLanes] ? size : lanes[i % kLanes];
  }
  return nan ? static_cast<double>(NAN) : static_cast<double>(*std::max_element(lanes, lanes + kLanes));
}

template <typename T>
LOCO_HD void multiply_of(const T* x, int64_t count, T factor, T* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = x[i] * factor;
}

template <typename T>
LOCO_HD void multiply_taps_of(const T* x, int64_t channels, int taps, const T* by_tap, T* out) {
  T factors[kFewTaps * kLanes];
  const bool few = taps <= kFewTaps && channels >= kLanes;
  const int64_t period = few ? taps * kLanes : taps, count = channels * taps;
  for (int64_t l = 0; few && l < period; l += taps) {
    for (int k = 0; k < taps; ++k) factors[l + k] = by_tap[k];
  }
  const T* cycle = few ? factors : by_tap;
  for (int64_t begin = 0; begin < count; begin += period) {
    const int64_t end = std::min(period, count - begin);
    for (int64_t k = 0; k < end; ++k) out[begin + k] = x[begin + k] * cycle[k];
  }
}

template <typename T>
LOCO_HD void adam_metric_of(const T* v, int64_t count, T correction, T eps, T lr, T* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = (std::sqrt(v[i]) / correction + eps) / lr;
}

template <typename T>
LOCO_HD void damp_of(const T* u, const T* d, int64_t count, T c, T* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = u[i] * (d[i] / (d[i] + c));
}

template <typename T>
LOCO_HD void clip_of(const T* u, int64_t count, T cap, T* out) {
  for (int64_t i = 0; i < count; ++i) {
    const T size = std::fabs(u[i]);
    out[i] = std::copysign(size > cap || cap != cap ? cap : size, u[i]);
  }
}

}  // namespace

LOCO_CLONES double squares(const float* x, int64_t count) { return squares_of<float>(x, count); }
LOCO_CLONES double squares(const double* x, int64_t count) { return squares_of<double>(x, count); }
LOCO_CLONES double wide_squares(const float* x, int64_t count) { return squares_of<double>(x, count); }
double wide_squares(const double* x, int64_t count) { return squares(x, count); }

LOCO_CLONES void tap_squares(const float* x, int64_t channels, int taps, double* by_tap) {
  tap_squares_of<float>(x, channels, taps, by_tap);
}
LOCO_CLONES void tap_squares(const double* x, int64_t channels, int taps, double* by_tap) {
  tap_squares_of<double>(x, channels, taps, by_tap);
}
LOCO_CLONES void wide_tap_squares(const float* x, int64_t channels, int taps, double* by_tap) {
  tap_squares_of<double>(x, channels, taps, by_tap);
}
void wide_tap_squares(const double* x, int64_t channels, int taps, double* by_tap) {
  tap_squares(x, channels, taps, by_tap);
}

LOCO_CLONES double weighed_squares(const float* u, const float* d, int64_t count) {
  return weighed_squares_of(u, d, count);
}
LOCO_CLONES double weighed_squares(const double* u, const double* d, int64_t count) {
  return weighed_squares_of(u, d, count);
}

LOCO_CLONES Damped damped_sums(const float* u, const float* d, int64_t count, double c) {
  const Damped sums = damped_of(u, d, count, static_cast<float>(c));
  const bool safe = sums.squares > 1e-28 && sums.slope > 1e-28 && sums.squares < 1e28 && sums.slope < 1e28;
  return safe ? sums : wide_damped_of(u, d, count, c);
}
LOCO_CLONES Damped damped_sums(const double* u, const double* d, int64_t count, double c) {
  return damped_of(u, d, count, c);
}

LOCO_CLONES Damped wide_damped_sums(const float* u, const float* d, int64_t count, double c) {
  return wide_damped_of(u, d, count, c);
}
Damped wide_damped_sums(const double* u, const double* d, int64_t count, double c) {
  return damped_sums(u, d, count, c);
}

LOCO_CLONES double smallest(const float* x, int64_t count) { return smallest_of(x, count); }
LOCO_CLONES double smallest(const double* x, int64_t count) { return smallest_of(x, count); }

LOCO_CLONES Above above(const float* u, const float* d, int64_t count, double cap, double level) {
  return d ? above_of<true>(u, d, count, cap, level) : above_of<false>(u, d, count, cap, level);
}
LOCO_CLONES Above above(const double* u, const double* d, int64_t count, double cap, double level) {
  return d ? above_of<true>(u, d, count, cap, level) : above_of<false>(u, d, count, cap, level);
}

LOCO_CLONES double largest(const float* x, int64_t count) { return largest_of(x, count); }
LOCO_CLONES double largest(const double* x, int64_t count) { return largest_of(x, count); }

LOCO_CLONES void multiply(const float* x, int64_t count, float factor, float* out) {
  multiply_of(x, count, factor, out);
}
LOCO_CLONES void multiply(const double* x, int64_t count, double factor, double* out) {
  multiply_of(x, count, factor, out);
}

LOCO_CLONES void multiply_taps(const float* x, int64_t channels, int taps, const float* by_tap, float* out) {
  multiply_taps_of(x, channels, taps, by_tap, out);
}
LOCO_CLONES void multiply_taps(const double* x, int64_t channels, int taps, const double* by_tap, double* out) {
  multiply_taps_of(x, channels, taps, by_tap, out);
}

LOCO_CLONES void adam_metric(const float* v, int64_t count, float correction, float eps, float lr, float* out) {
  adam_metric_of(v, count, correction, eps, lr, out);
}
LOCO_CLONES void adam_metric(const double* v, int64_t count, double correction, double eps, double lr, double* out) {
  adam_metric_of(v, count, correction, eps, lr, out);
}

LOCO_CLONES void damp(const float* u, const float* d, int64_t count, double c, float* out) {
  damp_of(u, d, count, static_cast<float>(c), out);
}
LOCO_CLONES void damp(const double* u, const double* d, int64_t count, double c, double* out) {
  damp_of(u, d, count, c, out);
}

LOCO_CLONES void clip(const float* u, int64_t count, float cap, float* out) { clip_of(u, count, cap, out); }
LOCO_CLONES void clip(const double* u, int64_t count, double cap, double* out) { clip_of(u, count, cap, out); }

}  // namespace loco::ring_prox
