// Solver for the scalars of math.h and metric.h for the filter of a block. All threads take the same branches: a sum
// over weights is that of the whole block, in float64, in an order that depends on the shape alone, and every thread
// receives it. Arrays of scalars lie in shared memory, and only thread 0 writes to them.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/gpu_memory.h"
#include "common/mistake.h"
#include "common/platform.h"
#include "ring_prox/gpu_table.h"
#include "ring_prox/metric.h"

namespace loco::ring_prox {

constexpr int kMostWarps = kMostThreads / 32;
constexpr int kMostSums = 3;                        // computed in one reduction in float64
constexpr int kMostMoments = Moments::kPowers + 1;  // computed in one reduction in float32

// Partial sums of the warps. They are double-buffered so that one barrier per sum is enough.
union Scratch {
  double parts[2][kMostSums][kMostWarps];
  float float_parts[2][kMostMoments + 1][kMostWarps];
};

// Binary operations for Sums::reduce. k is the index of the value among those reduced together.
struct Add {
  LOCO_DEVICE double operator()(int, double a, double b) const { return a + b; }
};

struct Larger {
  LOCO_DEVICE double operator()(double a, double b) const { return b > a || is_nan(b) ? b : a; }
  LOCO_DEVICE double operator()(int, double a, double b) const { return (*this)(a, b); }
};

// The operation for Above: its first two values are added, and of the last the maximum is taken.
struct AddButLast {
  LOCO_DEVICE double operator()(int k, double a, double b) const { return k == 2 ? Larger()(a, b) : a + b; }
};

// Sums over a filter's weights. T is their compute type; weights.for_ring(ring, visit) calls visit(weight, its metric,
// made finite) for this thread's share of a ring.
template <typename T, class Weights>
class Sums {
 public:
  // memory: solver_bytes of shared memory.
  LOCO_DEVICE Sums(const Weights& weights, int rings, Scratch& scratch, unsigned char* memory)
      : weights_(weights), rings_(rings), scratch_(scratch), memory_(memory) {}

  LOCO_DEVICE int rings() const { return rings_; }
  LOCO_DEVICE unsigned char* memory() const { return memory_; }
  LOCO_DEVICE unsigned warps() const { return hidden(blockDim.x / 32); }

  template <class Visit>
  LOCO_DEVICE void for_ring(int ring, const Visit& visit) const {
    weights_.for_ring(ring, visit);
  }

  // Reduce all threads' values by op in a fixed order; every thread receives the result.
  template <int count, class Op>
  LOCO_DEVICE void reduce(double (&values)[count], const Op& op) {
    buffer_ ^= !LOCO_MISTAKE(ring_buffer);
#pragma unroll
    for (int k = 0; k < count; ++k) {
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        values[k] = op(k, values[k], __shfl_xor_sync(0xffffffff, values[k], lanes));
      }
      if (threadIdx.x % 32 == 0) scratch_.parts[buffer_][k][threadIdx.x / 32] = values[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const double* parts = scratch_.parts[buffer_][k];
      values[k] = parts[0];
      for (unsigned w = 1, of = warps(); w < of; ++w) values[k] = op(k, values[k], parts[w]);
    }
  }

  // Return the warps' partial sums for a reduction in float32.
  LOCO_DEVICE float (&next_float_parts()) [kMostMoments + 1][kMostWarps] {
    buffer_ ^= !LOCO_MISTAKE(ring_buffer);
    return scratch_.float_parts[buffer_];
  }

  // Return a weight times the power of two that scaled_squares has found.
  LOCO_DEVICE T scaled(T u) const {
    if constexpr (sizeof(T) == 4) return u;
    return u * static_cast<T>(scale_);
  }

  // Return the power of two to multiply metrics by so that sums of their products with weights neither vanish nor
  // overflow.
  LOCO_DEVICE double scale_of_products() {
    if constexpr (sizeof(T) == 4) return 1;  // products of floats fit in float64
    double sizes[2] = {0, 0};
#pragma unroll 1  // unrolling would spill registers
    for (int r = 0; r < rings_; ++r) {
      for_ring(r, [&](T u, T d) {
        sizes[0] = Larger()(sizes[0], std::fabs(static_cast<double>(u)));
        if (d < kLargest<T>) sizes[1] = Larger()(sizes[1], d);
      });
    }
    reduce(sizes, Larger());
    if (!(sizes[0] > 0 && sizes[0] < kInfinity && sizes[1] > 0)) return 1;
    constexpr int kMost = 960;  // bound that keeps sums of metrics from overflowing, too
    int of_weight, of_metric;
    std::frexp(sizes[0], &of_weight);
    std::frexp(sizes[1], &of_metric);
    const int exponent = of_weight < -kMost ? kMost - of_metric : -of_weight - of_metric;
    return std::ldexp(1.0, exponent < -1020 ? -1020 : exponent > 1020 ? 1020 : exponent);
  }

  // Return the largest magnitude in rings begin .. end - 1; NaN if any is NaN.
  LOCO_DEVICE double largest(int begin, int end) {
    double size[1] = {0};
    for (int r = begin; r < end; ++r) {
      for_ring(r, [&](T u, T) { size[0] = Larger()(size[0], std::fabs(static_cast<double>(u))); });
    }
    reduce(size, Larger());
    return size[0];
  }

  // Write each ring's sum of squares to to[0], and that of weight times metric to to[1] if given. Weights are
  // multiplied by a power of two that keeps the sums within float64; return that power.
  template <int count>
  LOCO_DEVICE double scaled_squares(double* const (&to)[count]) {
    sum_squares(to);
    if constexpr (sizeof(T) == 4) return 1;  // squares of floats fit in float64
    if (are_safe<double>(to[0], 0, rings_)) return 1;
    scale_ = near_one(largest(0, rings_));
    if (LOCO_MISTAKE(ring_scale)) scale_ = 1 / scale_;
    if (scale_ != 1) sum_squares(to);
    return scale_;
  }

  // If the sums of squares of weight times metric, which scaled_squares has made, vanish or overflow, recompute them
  // from the products times a power of two. Return the exponent of that power, 0 if nothing was recomputed.
  LOCO_DEVICE int scale_weighted(double* weighted) {
    if constexpr (sizeof(T) == 4) return 0;
    if (are_safe<double>(weighted, 0, rings_)) return 0;
    double size[1] = {0};
    for (int r = 0; r < rings_; ++r) {
      for_ring(r, [&](T u, T d) {
        if (d < kLargest<T>) size[0] = Larger()(size[0], std::fabs(scaled(u) * static_cast<double>(d)));
      });
    }
    reduce(size, Larger());
    const double by = near_one(size[0]);
    if (by == 1) return 0;
    for (int r = 0; r < rings_; ++r) {
      double sums[1] = {0};
      for_ring(r, [&](T u, T d) {
        const double value = scaled(u) * static_cast<double>(d) * by;
        sums[0] += value * value;
      });
      reduce(sums, Add());
      if (threadIdx.x == 0) weighted[r] = sums[0];
    }
    __syncthreads();
    return std::ilogb(by);
  }

 private:
  template <int count>
  LOCO_DEVICE void sum_squares(double* const (&to)[count]) {
    for (int r = 0; r < rings_; ++r) {
      double sums[count] = {};
      for_ring(r, [&](T u, T d) {
        const double value = scaled(u), weighted = value * static_cast<double>(d);
        sums[0] += value * value;
        if constexpr (count == 2) sums[1] += weighted * weighted;
      });
      reduce(sums, Add());
      for (int k = 0; k < count && threadIdx.x == 0; ++k) to[k][r] = sums[k];
    }
    __syncthreads();
  }

  const Weights& weights_;
  int rings_;
  Scratch& scratch_;
  unsigned char* memory_;
  double scale_ = 1;
  int buffer_ = 0;
};

// Finds the factor f of math.h for a filter by itself.
struct OwnFactor {
  const Thresholds& thresholds;

  template <class Solve, class Penalty>
  LOCO_DEVICE void operator()(const Solve& solve, const Penalty& penalty, const double* found) const {
    solve_squared(thresholds, solve, penalty, found);
  }
};

// An array that only thread 0 reads and writes; reads of other threads give 0 and their writes are dropped.
struct OfLeader {
  struct Element {
    double* at;
    LOCO_DEVICE operator double() const { return at ? *at : 0; }
    LOCO_DEVICE void operator=(double value) const {
      if (at) *at = value;
    }
  };

  double* values;
  LOCO_DEVICE Element operator[](int i) const { return {threadIdx.x == 0 ? values + i : nullptr}; }
};

// Each of the following structs is the shared memory of one way to solve. solve(sums, thresholds, find) leaves in it
// what shrunk(weight, its metric, its ring) needs, for all threads to read. find(solve, penalty, found) takes the
// arguments of solve_squared; its first call of solve comes before one of penalty(found). Thread 0 calls it, and others
// may.
struct L2 {
  double squares[kMaxRings], t[kMaxRings], factors[kMaxRings];

  template <class Sums, class Find>
  LOCO_DEVICE void solve(Sums& sums, const Thresholds& thresholds, const Find& find) {
    const double scale = sums.scaled_squares({squares});
    const int rings = sums.rings();
    if (threadIdx.x == 0) {
      const auto solve = [&](double factor) {
        merge(thresholds, rings, factor, scale, t);
        chain(squares, t, rings, factors);
      };
      const auto penalty = [&](const double* of) { return l2_penalty(squares, of, thresholds.squared, rings) / scale; };
      find(solve, penalty, factors);
    }
    if (!LOCO_MISTAKE(ring_factors)) __syncthreads();
  }

  template <typename T>
  LOCO_DEVICE T shrunk(T u, T, int ring) const {
    return u * static_cast<T>(factors[ring]);
  }
};

// The weights that DirectSums sums over.
template <class Sums>
struct ScaledWeights {
  Sums& sums;

  template <class Visit>
  LOCO_DEVICE void for_ring(int ring, const Visit& visit) const {
    sums.for_ring(ring, [&](auto u, auto d) { visit(sums.scaled(u), d); });
  }
  LOCO_DEVICE void add_up(double (&values)[2]) const { sums.reduce(values, Add()); }
};

struct L2InMetric {
  double squares[kMaxRings], weighted[kMaxRings], inverses[kMaxRings], t[kMaxRings], factors[kMaxRings],
      coefficients[kMaxRings], derivatives[kMaxRings];
  int first;              // first ring that does not vanish
  int weighted_exponent;  // exponent of the power of two that scales `weighted`

  template <class Sums, class Find>
  LOCO_DEVICE void solve(Sums& sums, const Thresholds& thresholds, const Find& find) {
    const double scale = sums.scaled_squares({squares, weighted});
    const int rings = sums.rings();
    const int exponent = sums.scale_weighted(weighted);
    if (threadIdx.x == 0) weighted_exponent = exponent;
    const ScaledWeights<Sums> weights{sums};
    const DirectSums<const ScaledWeights<Sums>> in_metric{weights};
    if (threadIdx.x == 0) {
      double sum = 0;
      for (int r = 0; r < rings; ++r) inverses[r] = 1 / std::sqrt(sum += squares[r]);
    }
    int alive = 0;  // copy of `first` in registers: no thread may read the original while thread 0 writes it
    const auto solve = [&](double factor) {
      if (threadIdx.x == 0) {
        merge(thresholds, rings, factor, scale, t);
#pragma unroll 1  // unrolling would take two more registers
        for (int n = 0; n < rings; ++n) derivatives[n] = std::ldexp(t[n], weighted_exponent);
        first = chain(weighted, derivatives, rings, factors);
      }
      __syncthreads();
      alive = first;
      solve_metric(in_metric, inverses, t, alive, rings, OfLeader{coefficients}, OfLeader{derivatives});
      __syncthreads();
    };
    const auto penalty = [&](const double* of) {
      return (of ? metric_penalty(in_metric, of, thresholds.squared, alive, rings)
                 : l2_penalty(squares, nullptr, thresholds.squared, rings)) /
             scale;
    };
    find(solve, penalty, coefficients);
  }

  template <typename T>
  LOCO_DEVICE T shrunk(T u, T d, int ring) const {
    const bool alone = (!LOCO_MISTAKE(ring_first) && ring < first) || coefficients[ring] == 0;
    return alone ? u * static_cast<T>(ring >= first) : static_cast<T>(damped(u, d, coefficients[ring]));
  }
};

struct Linf {
  double sizes[kMaxRings], t[kMaxRings], caps[kMaxRings];

  template <class Sums, class Find>
  LOCO_DEVICE void solve(Sums& sums, const Thresholds& thresholds, const Find& find) {
    const int rings = sums.rings();
    const double scale = sums.scale_of_products();
    const auto above = [&](int n, OfLeader, double level) {
      if (!LOCO_MISTAKE(ring_caps)) __syncthreads();  // caps have been written
      double values[3] = {0, 0, 0};
      for (int r = 0; r <= n; ++r) {
        const double cap = r == n ? kInfinity : caps[r];
        sums.for_ring(r, [&](auto u, auto d) {
          const double size = std::fabs(static_cast<double>(u)), clipped = size > cap ? cap : size;
          if (clipped <= level) return;
          const bool stays = d == kLargest<decltype(d)>;
          const double weight = stays ? 0 : d * scale;
          values[2] = Larger()(values[2], stays ? size : 0);
          values[0] += stays ? 0 : weight * clipped;
          values[1] += weight;
        });
      }
      sums.reduce(values, AddButLast());
      return Above{values[0], values[1], values[2]};
    };
    const auto solve = [&](double factor) {
      if (threadIdx.x == 0) merge(thresholds, rings, factor, scale, t);
      __syncthreads();
      solve_linf(above, t, rings, OfLeader{caps});
      __syncthreads();
    };
    for (int r = 0; thresholds.squared && r < rings; ++r) {
      const double size = sums.largest(r, r + 1);
      if (threadIdx.x == 0) sizes[r] = size;
    }
    __syncthreads();
    const auto penalty = [&](const double* of) { return linf_penalty(sizes, of, thresholds.squared, rings); };
    find(solve, penalty, caps);
  }

  template <typename T>
  LOCO_DEVICE T shrunk(T u, T, int ring) const {
    const T size = std::fabs(u), cap = static_cast<T>(caps[ring]);
    return std::copysign(size > cap || cap != cap ? cap : size, u);
  }
};

}  // namespace loco::ring_prox
