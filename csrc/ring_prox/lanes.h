// Sums in interleaved lanes: term i goes to lane i modulo the number of lanes, and the lanes are added in a fixed
// order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ring_prox/rows.h"

namespace loco::ring_prox {
LOCO_KERNELS_BEGIN

// The number of terms that are summed in their own type before they are added to a float64 sum.
constexpr int kShortSum = 4;

// Return the sum of the lanes by adding halves, then quarters and so on, elementwise. Each loop has a constant length:
// otherwise the compiler would keep the lanes in memory while they are summed.
LOCO_HD double total(const double (&lanes)[kLanes]) {
  static_assert(kLanes == 16, "three halvings leave two sums");
  double sums[8];
  for (int l = 0; l < 8; ++l) sums[l] = lanes[l] + lanes[l + 8];
  for (int l = 0; l < 4; ++l) sums[l] += sums[l + 4];
  for (int l = 0; l < 2; ++l) sums[l] += sums[l + 2];
  return sums[0] + sums[1];
}

LOCO_HD const int32_t* rings_for(const Run& run, float) { return run.ring_of_lane; }
LOCO_HD const int64_t* rings_for(const Run& run, double) { return run.ring_of_long_lane; }

// Broadcast the value of each ring to the lanes of a run: by_lane[k] = by_ring[ring_of_lane[k]].
template <typename T>
LOCO_HD void spread(const Run& run, const double* by_ring, T* by_lane) {
  const auto* const ring_of_lane = rings_for(run, T());
  std::fill(by_lane, by_lane + run.period, static_cast<T>(by_ring[0]));
  for (int r = 1; r < run.rings; ++r) {
    const T value = static_cast<T>(by_ring[r]);
#pragma GCC ivdep
    for (int64_t k = 0; k < run.period; ++k) by_lane[k] = ring_of_lane[k] == r ? value : by_lane[k];
  }
}

// Return x if the condition holds, else 0. GCC 12 miscompiles a select here: it loads x by the mask of another vector.
template <typename T>
LOCO_HD T only_if(bool condition, T x) {
  std::conditional_t<sizeof(T) == 4, int32_t, int64_t> bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits &= -static_cast<decltype(bits)>(condition);
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Return the sum of the lanes that belong to ring r. lanes is [stride].
template <typename T>
LOCO_HD double sum_lanes(const Run& run, const T* lanes, int r) {
  const auto* const ring = rings_for(run, T());
  T parts[kLanes] = {};
  for (int64_t k = 0; k < run.stride(); k += kLanes) {
    for (int l = 0; l < kLanes; ++l) parts[l] += only_if(ring[k + l] == r, lanes[k + l]);
  }
  double wide[kLanes];
  for (int l = 0; l < kLanes; ++l) wide[l] = static_cast<double>(parts[l]);
  return total(wide);
}

// Add the lanes of each ring to its sums: `exact` to sums[0] and rough[s - 1] to sums[s]. Each is [stride].
template <int count, typename Part>
LOCO_HD void add_lanes(const Run& run, const double* exact, const Part* rough, double* const (&sums)[count]) {
  for (int r = 0; r < run.rings; ++r) {
    sums[0][r] += sum_lanes(run, exact, r);
    for (int s = 1; s < count; ++s) sums[s][r] += sum_lanes(run, rough + (s - 1) * run.stride(), r);
  }
}

// Add to sums[s], [rings], what the weights of a run contribute. term(i, lane, parts) adds the contributions of weight
// i to parts[count]; the first sum is kept in float64 and all others as Part.
template <typename Part, int count, typename Term>
LOCO_HD void sum_uniform(const Run& run, const Term& term, double* const (&sums)[count]) {
  double exact[kLanes] = {};
  Part rough[count][kLanes] = {};
  const auto add = [&](int64_t i, int l, int terms) LOCO_INLINE {
    Part parts[count] = {};
    for (int k = 0; k < terms; ++k) term(i + k * kLanes + l, l, parts);
    exact[l] += static_cast<double>(parts[0]);
    for (int s = 1; s < count; ++s) rough[s][l] += parts[s];
  };
  int64_t i = 0;
  for (; i + kShortSum * kLanes <= run.count; i += kShortSum * kLanes) {
    for (int l = 0; l < kLanes; ++l) add(i, l, kShortSum);
  }
  for (; i + kLanes <= run.count; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) add(i, l, 1);
  }
  for (int l = 0; i + l < run.count; ++l) add(i, l, 1);
  sums[0][run.ring] += total(exact);
  for (int s = 1; s < count; ++s) {
    for (int l = 0; l < kLanes; ++l) exact[l] = static_cast<double>(rough[s][l]);
    sums[s][run.ring] += total(exact);
  }
}

template <typename Part, int count, typename Term>
LOCO_HD void sum_pattern(const Run& run, const Term& term, double* const (&sums)[count]) {
  const int64_t period = run.period, stride = run.stride();
  double* const exact = run.lanes;
  Part* const rough = reinterpret_cast<Part*>(exact + stride);
  std::fill(exact, exact + stride, 0.0);
  std::fill(rough, rough + (count - 1) * stride, Part(0));
  const auto add = [=](int64_t i, int64_t l, int terms) LOCO_INLINE {
    Part parts[count] = {};
    for (int k = 0; k < terms; ++k) term(i + k * period + l, l, parts);
    exact[l] += static_cast<double>(parts[0]);
    for (int s = 1; s < count; ++s) rough[(s - 1) * stride + l] += parts[s];
  };
  int64_t i = 0;
  for (; i + kShortSum * period <= run.count; i += kShortSum * period) {
#pragma GCC ivdep
    for (int64_t l = 0; l < period; ++l) add(i, l, kShortSum);
  }
  for (; i < run.count; i += period) {
    const int64_t rest = std::min(period, run.count - i);
#pragma GCC ivdep
    for (int64_t l = 0; l < rest; ++l) add(i, l, 1);
  }
  add_lanes(run, exact, rough, sums);
}

LOCO_KERNELS_END
}  // namespace loco::ring_prox
