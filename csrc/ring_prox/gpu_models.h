// Solver for the l2 prox in a metric of a block's filter with weights in float32, by models (metric.h). As
// gpu_solve.h's solver, but a pass over the weights has no float64 instruction, of which many GPUs execute two per
// cycle: moments are summed in float32, and thread 0 alone solves in float64 for the scalars.
//
// Errors: a term rounds a few times in float32, as the CPU's terms do. The sum of the terms of ||x||^2 is compensated:
// it is off by two roundings and 2^-48 for each term. Those of other moments, from which only steps between models are
// found, are off by 2^-24 for each term of a thread. Where moments nearly vanish or overflow in float32, or the result
// depends on their last digits, the pass is made again in float64.
#pragma once

#include <cmath>
#include <type_traits>

#include "common/mistake.h"
#include "common/platform.h"
#include "ring_prox/gpu_solve.h"
#include "ring_prox/metric.h"

namespace loco::ring_prox {

// A sum of float32 numbers, as sum + rest (Kahan 1965).
struct CompensatedSum {
  float sum = 0, rest = 0;

  LOCO_DEVICE void add(float x) {
    const float term = x + rest, total = sum + term;
    rest = term - (total - sum);
    sum = total;
  }

  // Add another sum. The order of the two changes no bit.
  LOCO_DEVICE void add(const CompensatedSum& other) {
    const float total = sum + other.sum, part = total - sum;
    const float error = (sum - (total - part)) + (other.sum - part);
    rest = (rest + other.rest) + error;
    sum = total;
  }
};

// A block's sums over a ring: of x^2 / (d + c)^k and, if there is one more, of (d u)^2.
template <typename Part, int count>
struct RingSums {
  double values[count] = {};

  LOCO_DEVICE void add(int k, Part x) { values[k] += x; }

  template <class Sums>
  LOCO_DEVICE void write(Sums& sums, double* to, int stride) {
#pragma unroll
    for (int k = 0; k < count; ++k) {  // one by one: together they would take more shared memory, all the time
      double value[1] = {values[k]};
      sums.reduce(value, Add());
      if (threadIdx.x == 0) to[k * stride] = value[0];
    }
  }
};

template <int count>
struct RingSums<float, count> {
  CompensatedSum square;
  float others[count] = {};  // the first is not used

  LOCO_DEVICE void add(int k, float x) { k == 0 ? square.add(x) : void(others[k] += x); }

  template <class Sums>
  LOCO_DEVICE void write(Sums& sums, double* to, int stride) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      const auto other = [&](float x) { return __shfl_xor_sync(0xffffffff, x, lanes); };
      square.add({other(square.sum), other(square.rest)});
#pragma unroll
      for (int k = 1; k < count; ++k) others[k] += other(others[k]);
    }
    float (&parts)[kMostMoments + 1][kMostWarps] = sums.next_float_parts();
    if (threadIdx.x % 32 == 0) {
      const int warp = threadIdx.x / 32;
      parts[0][warp] = square.sum;
      parts[kMostMoments][warp] = square.rest;
#pragma unroll
      for (int k = 1; k < count; ++k) parts[k][warp] = others[k];
    }
    __syncthreads();
    const unsigned k = threadIdx.x;
    if (k >= count) return;
    CompensatedSum sum;
    for (unsigned w = 0, warps = sums.warps(); w < warps; ++w) {
      sum.add({parts[k][w], k == 0 ? parts[kMostMoments][w] : 0});
    }
    to[k * stride] = static_cast<double>(sum.sum) + static_cast<double>(sum.rest);
  }
};

// Write the moments of rings from `first` on for c = c0, or c = 0 and with them the sums of (d u)^2, to [sums, rings].
// Terms have the type Part.
template <typename Part, bool at_zero, class Sums>
LOCO_DEVICE void sum_moments(Sums& sums, int first, const double* c0, double* to) {
  constexpr int kPowers = Moments::kPowers;
  const int rings = sums.rings();
  LOCO_NO_UNROLL
  for (int r = first; r < rings; ++r) {
    RingSums<Part, at_zero ? kPowers + 1 : kPowers> ring;
    const Part c = at_zero ? Part(0) : static_cast<Part>(c0[r]);
    sums.for_ring(r, [&](float u, float d) {
      const Part metric = d, inverse = Part(1) / (at_zero ? metric : metric + c);
      const Part x = at_zero ? Part(u) : u * (metric * inverse);
      Part value = x * x;
      ring.add(0, value);
#pragma unroll
      for (int k = 1; k < kPowers; ++k) ring.add(k, value *= inverse);
      if constexpr (at_zero) ring.add(kPowers, (metric * u) * (metric * u));
    });
    ring.write(sums, to + r, rings);
  }
  __syncthreads();
}

// The arrays of ModelSearch and others, [rings] each, one after the other in shared memory.
struct SharedArrays {
  double* begin;
  int rings;

  LOCO_DEVICE SharedArrays(unsigned char* memory, int rings)
      : begin(reinterpret_cast<double*>(memory)),
        rings(rings),
        weighted(array(4)),
        sums(array(5)),
        c0(array(9)),
        coefficients(array(10)),
        squares(array(11)),
        pole(array(12)),
        moving(array(13)),
        derivatives(array(14)),
        inverses(array(15)),
        t(array(16)) {}

  double* weighted;  // sums of (d u)^2, behind the moments for c = 0
  double *sums, *c0, *coefficients, *squares, *pole, *moving, *derivatives;
  double *inverses, *t;  // 1 over norms of u on rings 0..r, and thresholds

  LOCO_DEVICE MomentsView zero() const { return {begin, rings}; }
  LOCO_DEVICE MomentsView moments() const { return {sums, rings}; }

 private:
  LOCO_DEVICE double* array(int k) const { return begin + k * rings; }
};

struct L2ByModels {
  double coefficients[kMaxRings];  // infinite where a ring vanishes
  float damping[kMaxRings];        // the same in float32
  ModelSearch<float> search;
  int first;          // first ring that does not vanish
  bool zero_is_wide;  // whether the sums for c = 0 are in float64
  bool undecided;     // whether these must be, to tell `first`
  bool more;          // whether the search needs another pass
  bool wide_damping;  // whether coefficients are beyond the range that float32 can damp by

  template <class Sums, class Find>
  LOCO_DEVICE void solve(Sums& sums, const Thresholds& thresholds, const Find& find) {
    const int rings = sums.rings();
    SharedArrays a(sums.memory(), rings);
    sum_moments<float, true>(sums, 0, nullptr, a.begin);
    if (threadIdx.x == 0) {
      zero_is_wide = false;
      for (int k = 0; k < Moments::kPowers; ++k) zero_is_wide |= !are_safe<float>(a.zero().power(k), 0, rings);
    }
    __syncthreads();
    if (zero_is_wide) sum_moments<double, true>(sums, 0, nullptr, a.begin);
    if (threadIdx.x == 0) {
      double sum = 0;
      LOCO_NO_UNROLL
      for (int r = 0; r < rings; ++r) a.inverses[r] = 1 / std::sqrt(sum += a.begin[r]);
    }
    int alive = 0;  // copy of `first` in registers: no thread may read the original while thread 0 writes it
    const auto solve = [&](double factor) {
      if (threadIdx.x == 0) {
        merge(thresholds, rings, factor, 1, a.t);
        undecided = !find_first(a, rings);
      }
      __syncthreads();
      if (undecided) {
        sum_moments<double, true>(sums, 0, nullptr, a.begin);
        if (threadIdx.x == 0) zero_is_wide = true, find_first(a, rings);
        __syncthreads();
      }
      alive = first;
      if (threadIdx.x == 0) more = alive < rings && search.begin(a.zero(), a, a.inverses, a.t, alive, rings);
      __syncthreads();
      if (alive == rings) return;
      do {
        if (more && search.wide()) {
          sum_moments<double, false>(sums, alive, a.c0, a.sums);
        } else if (more) {
          sum_moments<float, false>(sums, alive, a.c0, a.sums);
        }
        __syncthreads();  // `more` has been read
        if (threadIdx.x == 0) more = search.next(a.zero(), a, a.inverses, a.t, alive, rings);
        __syncthreads();
      } while (more);
    };
    const auto left = [&](int r, double) { return Damped{a.squares[r], 0}; };
    const auto penalty = [&](const double* of) {
      return of ? metric_penalty(left, of, thresholds.squared, alive, rings)
                : l2_penalty(a.begin, nullptr, thresholds.squared, rings);
    };
    find(solve, penalty, a.coefficients);
    keep(a, alive, rings);
    __syncthreads();
  }

  template <typename T>
  LOCO_DEVICE T shrunk(T u, T d, int ring) const {
    if (wide_damping) return coefficients[ring] == 0 ? u : static_cast<T>(damped(u, d, coefficients[ring]));
    const T c = damping[ring];
    return u * (c == 0 ? T(1) : d / (d + c));
  }

 private:
  // Find which rings vanish. Return false if sums in float32 do not tell.
  LOCO_DEVICE bool find_first(const SharedArrays& a, int rings) {
    constexpr double kSafely = 0.01;
    if (!zero_is_wide && !are_safe<float>(a.weighted, 0, rings)) return false;
    bool same = true;
    LOCO_NO_UNROLL
    for (int i = 0; i < 2; ++i) {
      const double scale = zero_is_wide ? 1 : i == 0 ? 1 - kSafely : 1 + kSafely;
      LOCO_NO_UNROLL
      for (int r = 0; r < rings; ++r) a.pole[r] = a.t[r] * scale;
      const int found = chain(a.weighted, a.pole, rings, a.derivatives);
      same = i == 0 || found == first;
      first = found;
    }
    return same;
  }

  LOCO_DEVICE void keep(const SharedArrays& a, int alive, int rings) {
    constexpr double kLeast = 1e-30;
    for (int r = threadIdx.x; r < rings; r += blockDim.x) {
      const double c = r < alive ? (LOCO_MISTAKE(ring_first) ? 0 : kInfinity) : a.coefficients[r];
      coefficients[r] = c;
      damping[r] = static_cast<float>(c);
    }
    if (threadIdx.x > 0) return;
    wide_damping = false;
    for (int r = alive; r < rings; ++r) {
      const double c = a.coefficients[r];
      wide_damping |= c != 0 && c != kInfinity && (c < kLeast || c > 1 / kLeast);
    }
  }
};

// The solver for the l2 prox in a metric of weights whose arithmetic is in T.
template <typename T>
using MetricSolver = std::conditional_t<std::is_same_v<T, float>, L2ByModels, L2InMetric>;

}  // namespace loco::ring_prox
