// Vectorised sums over contiguous weights, and their shrinkage.
//
// rows.h has the formula of each function. x, u, d and out are contiguous [count]; sums, factors and c are float64
// [rings]; the ring of each weight is given by a Run.
//
// Everything runs in one thread. A run of a single ring is summed in kLanes lanes, any other in one lane for each
// weight of a period (lanes.h).
#include "ring_prox/rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ring_prox/lanes.h"

namespace loco::ring_prox {
LOCO_KERNELS_BEGIN

constexpr int kBlock = 64;

template <typename Part, typename T>
LOCO_HD void squares_of(const T* x, const Run& run, double* by_ring) {
  const auto term = [=](int64_t i, int64_t, Part* parts) LOCO_INLINE {
    const Part value = static_cast<Part>(x[i]);
    parts[0] += value * value;
  };
  double* const sums[1] = {by_ring};
  run.uniform() ? sum_uniform<Part>(run, term, sums) : sum_pattern<Part>(run, term, sums);
}

// Add x^2 times the powers of `inverse`.
template <typename Part>
LOCO_HD void add_powers(Part x, Part inverse, Part* parts) {
  Part value = x * x;
  parts[0] += value;
  for (int k = 1; k < Moments::kPowers; ++k) parts[k] += value *= inverse;
}

template <typename T>
void weighted_squares(const T* u, const T* d, const Run& run, double* by_ring) {
  const auto term = [=](int64_t i, int64_t, double* parts) LOCO_INLINE {
    const double value = static_cast<double>(u[i]) * finite_metric(d[i]);
    parts[0] += value * value;
  };
  double* const sums[1] = {by_ring};
  run.uniform() ? sum_uniform<double>(run, term, sums) : sum_pattern<double>(run, term, sums);
}

template <typename Part, typename T>
LOCO_HD void first_moments_of(const T* u, const T* d, const Run& run, double* const (&sums)[Moments::kPowers]) {
  const auto term = [=](int64_t i, int64_t, Part* parts)
                        LOCO_INLINE { add_powers(static_cast<Part>(u[i]), Part(1) / static_cast<Part>(d[i]), parts); };
  run.uniform() ? sum_uniform<Part>(run, term, sums) : sum_pattern<Part>(run, term, sums);
}

template <typename Part, typename T, typename C>
LOCO_HD auto moment(const T* u, const T* d, const C& c) {
  return [=](int64_t i, int64_t lane, Part* parts) LOCO_INLINE {
    const Part weight = finite_metric(static_cast<Part>(d[i])), inverse = Part(1) / (weight + c(lane));
    add_powers(static_cast<Part>(u[i]) * (weight * inverse), inverse, parts);
  };
}

template <typename Part, typename T>
LOCO_HD void moments_of(const T* u, const T* d, const Run& run, const double* c, Moments& moments) {
  double* const sums[] = {moments.power[0], moments.power[1], moments.power[2], moments.power[3]};
  if (c == nullptr) return first_moments_of<Part>(u, d, run, sums);
  if (run.uniform()) {
    const Part same = static_cast<Part>(c[run.ring]);
    return sum_uniform<Part>(run, moment<Part>(u, d, [=](int64_t) LOCO_INLINE { return same; }), sums);
  }
  Part* const by_lane = reinterpret_cast<Part*>(run.lanes + Moments::kPowers * run.stride());
  spread(run, c, by_lane);
  sum_pattern<Part>(run, moment<Part>(u, d, [=](int64_t lane) LOCO_INLINE { return by_lane[lane]; }), sums);
}

// Return the level as T, rounded down.
template <typename T>
LOCO_HD T not_above(double level) {
  const T value = static_cast<T>(level);
  return static_cast<double>(value) > level
             ? value - std::fabs(value) * std::numeric_limits<T>::epsilon() - std::numeric_limits<T>::denorm_min()
             : value;
}

template <bool weighted, typename T>
LOCO_HD Above above_of(const T* u, const T* d, int64_t count, double cap, double level) {
  double mass[kLanes] = {}, weight[kLanes] = {};
  const auto add = [&](int64_t i, int l) LOCO_INLINE {
    const double size = std::fabs(static_cast<double>(u[i]));
    const double clipped = size > cap ? cap : size;
    const bool over = !(clipped <= level);
    const double w = weighted ? static_cast<double>(d[i]) : 1.0;
    mass[l] += over && w != 0 ? w * clipped : 0.0;
    weight[l] += over ? w : 0.0;
  };
  // Test whole blocks first: once the level has been found, most contain nothing above it.
  const T least = level > -1 ? not_above<T>(level) : T(-1);
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    int any = 0;
    for (int l = 0; l < kBlock; ++l) any |= !(std::fabs(u[i + l]) <= least);
    if (any == 0) continue;
    for (int k = 0; k < kBlock; k += kLanes) {
      for (int l = 0; l < kLanes; ++l) add(i + k + l, l);
    }
  }
  for (int64_t l = 0; i + l < count; ++l) add(i + l, static_cast<int>(l % kLanes));
  return {total(mass), total(weight), 0};
}

template <bool weighted, typename T>
LOCO_HD double least_level_of(const T* u, const T* d, int64_t count, double cap, double t) {
  double lanes[kLanes];
  for (double& lane : lanes) lane = -1;
  const auto look = [&](int64_t i, int l) LOCO_INLINE {
    const double size = std::fabs(static_cast<double>(u[i]));
    const double level = (size > cap ? cap : size) - (weighted ? t / static_cast<double>(d[i]) : t);
    lanes[l] = level > lanes[l] ? level : lanes[l];
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) look(i + l, l);
  }
  for (int l = 0; i + l < count; ++l) look(i + l, l);
  return *std::max_element(lanes, lanes + kLanes);
}

template <typename T>
double largest(const T* x, int64_t count) {
  T lanes[kLanes] = {};
  bool nan = false;
  for (int64_t i = 0; i < count; ++i) {
    const T size = std::fabs(x[i]);
    nan |= size != size;
    lanes[i % kLanes] = size > lanes[i % kLanes] ? size : lanes[i % kLanes];
  }
  return nan ? static_cast<double>(NAN) : static_cast<double>(*std::max_element(lanes, lanes + kLanes));
}

// Write out[i] = change(i, value of weight i's ring).
template <typename T, typename Change>
LOCO_HD void change_by_ring(const Run& run, const double* by_ring, const Change& change, T* out) {
  if (run.uniform()) {
    const T value = static_cast<T>(by_ring[run.ring]);
#pragma GCC ivdep
    for (int64_t i = 0; i < run.count; ++i) out[i] = change(i, value);
    return;
  }
  T* const by_lane = reinterpret_cast<T*>(run.lanes);
  spread(run, by_ring, by_lane);
  for (int64_t begin = 0; begin < run.count; begin += run.period) {
    const int64_t end = std::min(run.period, run.count - begin);
#pragma GCC ivdep
    for (int64_t l = 0; l < end; ++l) out[begin + l] = change(begin + l, by_lane[l]);
  }
}

template <typename T>
void multiply(const T* x, int64_t count, T factor, T* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = x[i] * factor;
}

template <typename T>
void multiply_rings(const T* x, const Run& run, const double* by_ring, T* out) {
  change_by_ring(run, by_ring, [=](int64_t i, T factor) LOCO_INLINE { return x[i] * factor; }, out);
}

// Damp in double, for coefficients that float32 cannot represent or with which d + c might overflow it.
LOCO_HD void damp_wide(const float* u, const float* d, const Run& run, const double* c, float* out) {
  for (int64_t i = 0; i < run.count; ++i) {
    const double by = c[run.uniform() ? run.ring : run.ring_of_lane[i % run.period]];
    out[i] = by == 0           ? u[i]
             : by == kInfinity ? u[i] * 0.0f
                               : static_cast<float>(u[i] * (finite_metric(d[i]) / (finite_metric(d[i]) + by)));
  }
}
LOCO_HD void damp_wide(const double*, const double*, const Run&, const double*, double*) {}

template <typename T>
void damp(const T* u, const T* d, const Run& run, const double* c, T* out) {
  constexpr double kLeast = 1e-30;
  const auto factor = [=](int64_t i, T by) LOCO_INLINE {
    const T weight = finite_metric(d[i]);
    return weight / (weight + by);
  };
  bool special = false;
  for (int r = 0; r < run.rings; ++r) {
    if (sizeof(T) == 4 && c[r] != 0 && c[r] != kInfinity && (c[r] < kLeast || c[r] > 1 / kLeast)) {
      return damp_wide(u, d, run, c, out);
    }
    special |= !(static_cast<T>(c[r]) > T(0) && static_cast<T>(c[r]) < T(kInfinity));
  }
  if (!special) return change_by_ring(run, c, [=](int64_t i, T by) LOCO_INLINE { return u[i] * factor(i, by); }, out);
  const auto change = [=](int64_t i, T by) LOCO_INLINE {
    return u[i] * (by == T(0) ? T(1) : by == T(kInfinity) ? T(0) : factor(i, by));
  };
  change_by_ring(run, c, change, out);
}

template <typename T>
void clip(const T* u, int64_t count, T cap, T* out) {
  for (int64_t i = 0; i < count; ++i) {
    const T size = std::fabs(u[i]);
    out[i] = std::copysign(size > cap || cap != cap ? cap : size, u[i]);
  }
}

template <typename T>
void squares(const T* x, const Run& run, bool wide, double* by_ring) {
  wide ? squares_of<double>(x, run, by_ring) : squares_of<T>(x, run, by_ring);
}

template <typename T>
void moments(const T* u, const T* d, const Run& run, bool wide, const double* c, Moments& moments) {
  wide ? moments_of<double>(u, d, run, c, moments) : moments_of<T>(u, d, run, c, moments);
}

template <typename T>
Above above(const T* u, const T* d, int64_t count, double cap, double level) {
  return d ? above_of<true>(u, d, count, cap, level) : above_of<false>(u, d, count, cap, level);
}

template <typename T>
double least_level(const T* u, const T* d, int64_t count, double cap, double t) {
  return d ? least_level_of<true>(u, d, count, cap, t) : least_level_of<false>(u, d, count, cap, t);
}

template <typename T>
constexpr RowKernels<T> kRows = {squares<T>, weighted_squares<T>, moments<T>,        above<T>, least_level<T>,
                                 largest<T>, multiply<T>,         multiply_rings<T>, damp<T>,  clip<T>};
const RowKernels<float> float_rows = kRows<float>;
const RowKernels<double> double_rows = kRows<double>;

LOCO_KERNELS_END
}  // namespace loco::ring_prox
