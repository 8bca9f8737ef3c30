// The prox of math.h and the ring norms of one filter (one output channel's weights) in contiguous memory.
//
//   norms[r] = ||u(ring r)||_2
//   out = argmin_x 1/2 sum_i d_i (x_i - u_i)^2 + sum_n t_n ||x(G_n)|| + (sum_n q_n ||x(G_n)||)^2
//
// u, d and out are contiguous [channels, taps], or [taps, channels] if channels are fastest; norms, t and q are
// [rings].
//
// One thread works on a filter. The filter is divided into runs (rows.h); vectorised loops over the runs give sums by
// ring, from which scalar code (math.h, metric.h) finds one factor, coefficient or cap per ring, and a last pass
// over the runs applies it. The linf norm needs the channels of each tap next to each other: a filter whose taps are
// fastest is transposed first, and its result transposed back.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "ring_prox/metric.h"
#include "ring_prox/penalty.h"
#include "ring_prox/rows.h"

namespace loco::ring_prox {

// If there are at most kFewTaps taps, kChannelsOfLanes channels of all taps have a lane each.
constexpr int kFewTaps = 64;
constexpr int kChannelsOfLanes = 16;

// Write the thresholds t + factor q, scaled to match weights and metrics of the given scale.
inline void merge_scaled(const Thresholds& thresholds, int rings, double factor, const Scale& scale, double* out) {
  merge(thresholds, rings, factor, 1, out);
  if (scale.weight == 1 && scale.metric == 1) return;
  for (int n = 0; n < rings; ++n) out[n] = scale.of_threshold(out[n]);
}

// Transpose [rows, columns] to [columns, rows].
template <typename T>
void transpose(const T* from, int64_t rows, int64_t columns, T* to) {
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) to[c * rows + r] = from[r * columns + c];
  }
}

// Solver for filters of one shape, one after the other; it keeps its buffers between them. T is float or double.
template <typename T>
class FilterSolver {
 public:
  explicit FilterSolver(const Shape& shape) : shape_(shape) {
    shape_.channels_fastest |= shape.taps == 1;
    divide();
  }

  // Write the norm of each ring of u. norms is [rings], ring 0 the outermost.
  void norms(const T* u, double* norms) {
    u_ = u, d_ = nullptr;
    scale_sums();
    for (int r = 0; r < shape_.rings; ++r) norms[r] = std::sqrt(zero_.power[0][r]) / scale_.weight;
  }

  // Write the minimiser that math.h describes. d may be null, and out may be u.
  void prox(const T* u, const T* d, const Thresholds& thresholds, bool linf, T* out) {
    u_ = u, d_ = d;
    if (!linf) {
      scale_sums();
      return d ? prox_in_metric(thresholds, out) : prox_l2(thresholds, out);
    }
    const bool transposes = !shape_.channels_fastest;
    if (transposes) transpose_channels();
    T* const to = transposes ? transposed_u_.data() : out;
    double caps[kMaxRings];
    find_caps(thresholds, caps);
    for_taps([&](int64_t at, int r) {
      rows<T>().clip(u_ + at, shape_.channels, static_cast<T>(caps[r] / scale_.weight), to + at);
    });
    if (transposes) transpose(to, shape_.taps, shape_.channels, out);
  }

 private:
  // A run of weights and the index of its first weight.
  struct Part {
    int64_t at;
    Run run;
  };

  struct alignas(64) Line {
    double values[8];
  };

  // Divide the filter into runs. A filter with a single ring is one run; one whose channels are fastest has a run for
  // each sequence of adjacent taps of the same ring; any other is one run along which the rings alternate periodically.
  void divide() {
    const Shape& s = shape_;
    if (s.rings == 1) {
      parts_.push_back({0, {s.numel(), 0, 0, 1}});
    } else if (s.channels_fastest) {
      for (int k = 0; k < s.taps; ++k) {
        const bool goes_on = k > 0 && s.ring_of_tap[k] == s.ring_of_tap[k - 1];
        if (!goes_on) parts_.push_back({k * s.channels, {0, s.ring_of_tap[k], 0, s.rings}});
        parts_.back().run.count += s.channels;
      }
    } else {
      const int64_t period = s.taps * (s.taps <= kFewTaps && s.channels >= kChannelsOfLanes ? kChannelsOfLanes : 1);
      for (int64_t l = 0; l < period; ++l) ring_of_lane_.push_back(s.ring_of_tap[l % s.taps]);
      Run run{s.numel(), 0, period, s.rings};
      ring_of_lane_.resize(run.stride(), -1);
      ring_of_long_lane_.assign(ring_of_lane_.begin(), ring_of_lane_.end());
      lanes_.resize(kLaneSums * run.stride() / 8);
      run.ring_of_lane = ring_of_lane_.data();
      run.ring_of_long_lane = ring_of_long_lane_.data();
      run.lanes = lanes_.data()->values;
      parts_.push_back({0, run});
    }
  }

  void transpose_channels() {
    transposed_u_.resize(shape_.numel());
    transpose(u_, shape_.channels, shape_.taps, transposed_u_.data());
    u_ = transposed_u_.data();
    if (d_ == nullptr) return;
    transposed_d_.resize(shape_.numel());
    transpose(d_, shape_.channels, shape_.taps, transposed_d_.data());
    d_ = transposed_d_.data();
  }

  void prox_l2(const Thresholds& thresholds, T* out) {
    double t[kMaxRings], factors[kMaxRings];
    const int rings = shape_.rings;
    const double* const squares = zero_.power[0];
    const auto solve = [&](double factor) {
      merge_scaled(thresholds, rings, factor, scale_, t);
      chain(squares, t, rings, factors);
    };
    const auto penalty = [&](const double* of) {
      return l2_penalty(squares, of, thresholds.squared, rings) / scale_.weight;
    };
    solve_squared(thresholds, solve, penalty, factors);
    for (const Part& part : parts_) rows<T>().multiply_rings(u_ + part.at, part.run, factors, out + part.at);
  }

  void prox_in_metric(const Thresholds& thresholds, T* out) {
    double t[kMaxRings], inverses[kMaxRings], coefficients[kMaxRings], left[kMaxRings];
    const int rings = shape_.rings;
    int first = 0;  // first ring that does not vanish
    double sum = 0;
    for (int r = 0; r < rings; ++r) inverses[r] = 1 / std::sqrt(sum += zero_.power[0][r]);
    const auto solve = [&](double factor) {
      merge_scaled(thresholds, rings, factor, scale_, t);
      first = first_alive(t);
      find_coefficients(inverses, t, first, coefficients, left);
    };
    const auto found = [&](int r, double) { return Damped{left[r], 0}; };
    const auto penalty = [&](const double* of) {
      return (of ? metric_penalty(found, coefficients, thresholds.squared, first, rings)
                 : l2_penalty(zero_.power[0], nullptr, thresholds.squared, rings)) /
             scale_.weight;
    };
    solve_squared(thresholds, solve, penalty, coefficients);
    std::fill(coefficients, coefficients + first, kInfinity);
    for (const Part& part : parts_) {
      rows<T>().damp(u_ + part.at, scaled_d_ + part.at, part.run, coefficients, out + part.at);
    }
  }

  // Return the first ring that does not vanish. The Cauchy-Schwarz inequality (sum u^2)^2 <= sum (d u)^2 sum (u / d)^2
  // gives a lower bound of sum (d u)^2, which usually suffices to see that no ring vanishes.
  int first_alive(const double* t) {
    double factors[kMaxRings], of_weighted[kMaxRings];
    const int rings = shape_.rings;
    if (!weighted_is_known_) {
      constexpr double kSafely = 0.99;
      bool all = true;
      for (int r = 0; r < rings; ++r) {
        const double square = zero_.power[0][r], bend = zero_.power[2][r];
        weighted_[r] = bend > 0 ? kSafely * square * square / bend : 0;
        all &= weighted_[r] > t[r] * t[r];  // a ring larger than its own threshold does not vanish
      }
      if (moderate_ && (all || chain(weighted_, t, rings, factors) == 0)) return 0;
      weigh();
    }
    for (int r = 0; r < rings; ++r) of_weighted[r] = t[r] * weighted_scale_;
    return chain(weighted_, of_weighted, rings, factors);
  }

  // Sum the squares of weight times metric. If those would vanish or overflow, the products are multiplied by a power
  // of two, weighted_scale_.
  void weigh() {
    weighted_is_known_ = true;
    weighted_scale_ = 1;
    std::fill(weighted_, weighted_ + shape_.rings, 0.0);
    if (moderate_) {
      for (const Part& part : parts_)
        rows<T>().weighted_squares(scaled_ + part.at, scaled_d_ + part.at, part.run, weighted_);
      return;
    }
    const auto weighted = [&](int64_t i) { return static_cast<double>(scaled_[i]) * finite_metric(scaled_d_[i]); };
    double size = 0;
    for (int64_t i = 0; i < shape_.numel(); ++i) {
      if (scaled_d_[i] < kLargest<T>) size = std::max(size, std::fabs(weighted(i)));
    }
    weighted_scale_ = near_one(size);
    for_weights([&](int64_t i, int r) {
      const double value = weighted(i) * weighted_scale_;
      weighted_[r] += value * value;
    });
  }

  // The weights that DirectSums sums over, for those outside the range of MetricModel.
  struct AllWeights {
    const FilterSolver& solver;

    template <typename Visit>
    void for_ring(int ring, const Visit& visit) const {
      solver.for_weights([&](int64_t i, int r) {
        if (r == ring) visit(solver.scaled_[i], finite_metric(solver.scaled_d_[i]));
      });
    }
    void add_up(double (&)[2]) const {}
  };

  // Write c of each ring from `first` on, and to `left` each ring's remaining sum of squares.
  void find_coefficients(const double* inverses, const double* t, int first, double* coefficients, double* left) {
    const int rings = shape_.rings;
    if (first == rings) return;  // all rings vanish
    if (moderate_) {
      ModelArrays arrays;
      ModelSearch<T> search;
      bool more = search.begin(zero_.view(), arrays, inverses, t, first, rings);
      do {
        if (more) sum_moments(search.wide(), arrays.c0, arrays.sums);
        more = search.next(zero_.view(), arrays, inverses, t, first, rings);
      } while (more);
      std::copy(arrays.coefficients + first, arrays.coefficients + rings, coefficients + first);
      std::copy(arrays.squares + first, arrays.squares + rings, left + first);
      return;
    }
    const AllWeights weights{*this};
    const DirectSums<const AllWeights> sums{weights};
    double derivatives[kMaxRings];
    solve_metric<true>(sums, inverses, t, first, rings, coefficients, derivatives);
    for (int r = first; r < rings; ++r) left[r] = sums(r, coefficients[r]).squares;
  }

  // Write the cap of each ring for the linf prox, at the weights' scale.
  void find_caps(const Thresholds& thresholds, double* caps) {
    double t[kMaxRings], sizes[kMaxRings], floors[kMaxRings];
    const int rings = shape_.rings;
    set_infinite_metrics_aside(floors);
    leave_unscaled();
    if (!products_safe()) bring_near_one();
    // Calls visit(weights of a tap, their metric or null, their cap) for the taps of rings 0..n.
    const auto for_group = [&](int n, const double* of, const auto& visit) {
      for_taps([&](int64_t at, int r) {
        if (r <= n) visit(scaled_ + at, d_ ? scaled_d_ + at : nullptr, r == n ? kInfinity : of[r]);
      });
    };
    const auto sums = [&](int n, const double* of, double level) {
      Above all{0, 0, 0};
      for (int r = 0; r <= n; ++r) {
        const double floor = floors[r] * scale_.weight;
        if (floor > all.floor || is_nan(floor)) all.floor = floor;
      }
      for_group(n, of, [&](const T* u, const T* d, double cap) {
        const Above part = rows<T>().above(u, d, shape_.channels, cap, level);
        all.mass += part.mass;
        all.weight += part.weight;
      });
      return all;
    };
    constexpr double kHuge = 1e290;
    // The search begins with all weights, but only few of them exceed a level that a single one would be clipped to, so
    // it can begin from there.
    const auto fewer_sums = [&](int n, const double* of, double level) {
      if (level >= 0) return sums(n, of, level);
      double least = level;
      for_group(n, of, [&](const T* u, const T* d, double cap) {
        least = std::max(least, rows<T>().least_level(u, d, shape_.channels, cap, t[n]));
      });
      // Start from level -1 if a sum of all would overflow: that keeps weights from being clipped, as it does on a GPU.
      const Above all = sums(n, of, least < kHuge ? least : level);
      return all.weight > 0 ? all : sums(n, of, level);
    };
    const auto solve = [&](double factor) {
      merge_scaled(thresholds, rings, factor, scale_, t);
      solve_linf(fewer_sums, t, rings, caps);
    };
    if (thresholds.squared) measure(sizes);
    const auto penalty = [&](const double* of) {
      return linf_penalty(sizes, of, thresholds.squared, rings) / scale_.weight;
    };
    solve_squared(thresholds, solve, penalty, caps);
  }

  // Replace infinite metrics by 0, in a copy, and write the largest magnitude of their weights in each ring. Channels
  // must be fastest.
  void set_infinite_metrics_aside(double* floors) {
    std::fill(floors, floors + shape_.rings, 0.0);
    if (d_ == nullptr || rows<T>().largest(d_, shape_.numel()) < kInfinity) return;
    finite_d_.assign(d_, d_ + shape_.numel());
    for_taps([&](int64_t at, int r) {
      for (int64_t i = at; i < at + shape_.channels; ++i) {
        if (finite_d_[i] != std::numeric_limits<T>::infinity()) continue;
        finite_d_[i] = 0;
        const double size = std::fabs(u_[i]);
        if (size > floors[r] || is_nan(size)) floors[r] = size;
      }
    });
    d_ = finite_d_.data();
  }

  void measure(double* sizes) const {
    for (int r = 0; r < shape_.rings; ++r) sizes[r] = 0;
    for_taps([&](int64_t at, int r) {
      const double size = rows<T>().largest(scaled_ + at, shape_.channels);
      if (size > sizes[r] || is_nan(size)) sizes[r] = size;
    });
  }

  // Call visit(offset of the tap's first channel, its ring) for each tap. Channels must be fastest.
  template <typename Visit>
  void for_taps(const Visit& visit) const {
    for (int k = 0; k < shape_.taps; ++k) visit(k * shape_.channels, shape_.ring_of_tap[k]);
  }

  // Call visit(offset of the weight, its ring) for each weight.
  template <typename Visit>
  void for_weights(const Visit& visit) const {
    for (int64_t i = 0; i < shape_.numel(); ++i) {
      visit(i, shape_.ring_of_tap[shape_.channels_fastest ? i / shape_.channels : i % shape_.taps]);
    }
  }

  void leave_unscaled() {
    scaled_ = u_, scaled_d_ = d_;
    weighted_is_known_ = false;
    scale_ = {};
    moderate_ = true;
  }

  // Sum over the rings. If the sums are not within float64, sum weights and metrics times powers of two instead.
  void scale_sums() {
    leave_unscaled();
    sum_up(false);
    if (all_safe(false)) return;
    if (sizeof(T) == 8) bring_near_one();
    sum_up(true);
    if (sizeof(T) == 8 && d_ != nullptr) {
      const double size = rows<T>().largest(scaled_, shape_.numel());
      moderate_ = all_safe(true) || !(size > 0 && size < kInfinity);
    }
  }

  // Return whether the sums for c = 0 are safe. `zeros`: accept rings that consist of zeros, too.
  bool all_safe(bool zeros) const {
    if (d_ == nullptr) return are_safe<T>(zero_.power[0], 0, shape_.rings);
    // MetricModel multiplies sums by one another, which narrows the range for doubles.
    constexpr double kLeast = sizeof(T) == 4 ? 1e-28 : 1e-75;
    bool all = true;
    for (int r = 0; r < shape_.rings; ++r) {
      if (zeros && zero_.power[0][r] == 0) continue;
      for (const auto& sums : zero_.power) all &= sums[r] > kLeast && sums[r] < 1 / kLeast;
    }
    return all;
  }

  void sum_up(bool wide) {
    if (d_ != nullptr) return sum_moments(wide, nullptr, zero_);
    std::fill(zero_.power[0], zero_.power[0] + shape_.rings, 0.0);
    for (const Part& part : parts_) rows<T>().squares(scaled_ + part.at, part.run, wide, zero_.power[0]);
  }

  void sum_moments(bool wide, const double* c, Moments& to) {
    to.clear(shape_.rings);
    for (const Part& part : parts_) rows<T>().moments(scaled_ + part.at, scaled_d_ + part.at, part.run, wide, c, to);
  }

  // Return whether sums of weights times metrics neither vanish nor overflow.
  bool products_safe() const {
    constexpr double kLeast = 1e-140;
    if (sizeof(T) == 4) return true;
    const auto safe = [](double size) { return size == 0 || (size > kLeast && size < 1 / kLeast); };
    return safe(rows<T>().largest(u_, shape_.numel())) &&
           (d_ == nullptr || safe(rows<T>().largest(d_, shape_.numel())));
  }

  // Set scaled_ and scaled_d_ to u and d times powers of two, scale_, which bring u and the finite metrics near 1. A
  // power is 1 if no largest magnitude exists (zeros only, no finite metric, or an infinite weight or NaN).
  void bring_near_one() {
    const int64_t numel = shape_.numel();
    const auto scaled = [numel](const T* from, double by, std::vector<T>& copy) {
      copy.resize(numel);
      rows<T>().multiply(from, numel, static_cast<T>(by), copy.data());
      return copy.data();
    };
    scale_.weight = near_one(rows<T>().largest(u_, numel));
    if (scale_.weight != 1) scaled_ = scaled(u_, scale_.weight, scaled_copy_);
    if (d_ == nullptr) return;
    double metric = 0;
    for (int64_t i = 0; i < numel; ++i) {
      if (d_[i] < kLargest<T>) metric = std::max(metric, static_cast<double>(d_[i]));
    }
    scale_.metric = near_one(metric);
    if (scale_.metric != 1) scaled_d_ = scaled(d_, scale_.metric, scaled_d_copy_);
  }

  Shape shape_;
  std::vector<Part> parts_;
  std::vector<int32_t> ring_of_lane_;
  std::vector<int64_t> ring_of_long_lane_;
  std::vector<Line> lanes_;
  const T *u_ = nullptr, *d_ = nullptr, *scaled_ = nullptr, *scaled_d_ = nullptr;
  double weighted_[kMaxRings];
  bool weighted_is_known_ = false;
  Scale scale_;           // the scale of scaled_ and scaled_d_
  bool moderate_ = true;  // whether all sums with a metric are in the range that MetricModel can use
  double weighted_scale_ = 1;
  Moments zero_;  // moments for c = 0; without a metric, only the squares
  std::vector<T> scaled_copy_, scaled_d_copy_, finite_d_, transposed_u_, transposed_d_;
};

}  // namespace loco::ring_prox
