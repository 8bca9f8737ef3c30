// A kernel is used where it lies if it is flat and of the type that it is worked on in, else from a copy. Each is
// handled by one thread from its first sum to its last weight, so the number of threads changes no bit.
#include "ring_prox/cpu.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/convert.h"
#include "ring_prox/rows.h"

namespace loco::ring_prox {
namespace {

constexpr int64_t kLeastShare = 16384;  // weights; a thread with fewer is not worth waking

template <typename T>
class Copy {
 public:
  // The weights of kernel o, in the order of the nest.
  const T* load(const Kernels& kernels, int64_t o, int64_t count) {
    const Operand at = moved(kernels, o);
    if (in_place<T>(at)) return static_cast<const T*>(at.data);
    values_.resize(count);
    const void* contiguous = at.data;
    if (!at.flat()) {
      raw_.resize(count);
      copy_block<false>(at, 0, count, raw_.data());
      contiguous = raw_.data();
    }
    loco::load(at.dtype, contiguous, values_.data(), count);
    return values_.data();
  }

  // Where kernel o is to be written; done() brings it to its place.
  T* place(const Kernels& kernels, int64_t o, int64_t count) {
    const Operand at = moved(kernels, o);
    if (in_place<T>(at)) return static_cast<T*>(at.data);
    values_.resize(count);
    return values_.data();
  }

  void done(const Kernels& kernels, int64_t o, int64_t count) {
    const Operand at = moved(kernels, o);
    if (in_place<T>(at)) return;
    if (at.flat()) return store(at.dtype, values_.data(), at.data, count);
    raw_.resize(count);
    store(at.dtype, values_.data(), raw_.data(), count);
    copy_block<true>(at, 0, count, raw_.data());
  }

 private:
  static Operand moved(const Kernels& kernels, int64_t o) {
    const Operand& operand = kernels.operand;
    return {element(operand, o * kernels.stride), operand.dtype, operand.nest};
  }

  std::vector<T> values_;
  std::vector<uint64_t> raw_;
};

// One kernel after the other.
template <typename T>
class Worker {
 public:
  explicit Worker(const Shape& shape) : shape_(shape), by_tap_(shape.taps), factors_(shape.taps) {}

  void norms(const Kernels& weight, int64_t o, double* norms) {
    u_ = u_copy_.load(weight, o, shape_.numel());
    const double scale = scaled_squares(nullptr);
    for (int r = 0; r < shape_.rings; ++r) norms[r] = std::sqrt(squares_[r]) / scale;
  }

  void prox(const ProxCall& call, int64_t o) {
    const int64_t count = shape_.numel();
    u_ = u_copy_.load(call.weight, o, count);
    d_ = call.metric.operand.data ? d_copy_.load(call.metric, o, count) : nullptr;
    out_ = out_copy_.place(call.out, o, count);
    const int64_t at = o * call.thresholds_stride;
    const Thresholds thresholds{call.thresholds + at, call.squared ? call.squared + at : nullptr};
    if (call.linf) {
      prox_linf(thresholds);
    } else if (d_ != nullptr) {
      prox_metric(thresholds);
    } else {
      prox_l2(thresholds);
    }
    out_copy_.done(call.out, o, count);
  }

 private:
  void prox_l2(const Thresholds& thresholds) {
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

  void prox_metric(const Thresholds& thresholds) {
    double t[kMaxRings], norms[kMaxRings], weighed[kMaxRings], factors[kMaxRings], coefficients[kMaxRings];
    const int rings = shape_.rings;
    const double scale = scaled_squares(weighed);
    double sum = 0;
    for (int r = 0; r < rings; ++r) norms[r] = std::sqrt(sum += squares_[r]);
    int first = 0;
    const auto squares = [&](int ring, double c) {
      return ring_sum(ring, [&](int64_t at) { return damped_squares(scaled_ + at, d_ + at, shape_.channels, c); });
    };
    const auto solve = [&](double factor) {
      merge(thresholds, rings, factor, scale, t);
      first = chain(weighed, t, rings, factors);
      solve_metric(squares, norms, t, first, rings, kTolerance, coefficients);
    };
    const auto penalty = [&](const double* of) {
      return (of ? metric_penalty(squares, of, thresholds.squared, first, rings)
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

  void prox_linf(const Thresholds& thresholds) {
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
      solve_linf(sums, t, rings, caps);
    };
    if (thresholds.squared) measure(sizes);
    const auto penalty = [&](const double* of) { return linf_penalty(sizes, of, thresholds.squared, rings); };
    solve_squared(thresholds, solve, penalty, caps);
    for_taps([&](int64_t at, int r) { clip(u_ + at, shape_.channels, static_cast<T>(caps[r]), out_ + at); });
  }

  // solve(factor) finds the prox with thresholds t + factor q and writes it to `found`; penalty(found): sum_n q_n
  // ||x(G_n)|| there, penalty(null): of u.
  template <typename Solve, typename Penalty>
  static void solve_squared(const Thresholds& thresholds, const Solve& solve, const Penalty& penalty, double* found) {
    double factor = 0;
    if (thresholds.squared) {
      const auto penalty_at = [&](double value) {
        solve(value);
        return penalty(found);
      };
      factor = squared_factor(penalty_at, penalty(nullptr));
    }
    solve(factor);
  }

  // The largest size in each ring.
  void measure(double* sizes) const {
    for (int r = 0; r < shape_.rings; ++r) sizes[r] = 0;
    for_taps([&](int64_t at, int r) {
      const double size = largest(u_ + at, shape_.channels);
      if (size > sizes[r] || is_nan(size)) sizes[r] = size;
    });
  }

  // visit(offset of the tap's first channel, its ring), channels fastest.
  template <typename Visit>
  void for_taps(const Visit& visit) const {
    for (int k = 0; k < shape_.taps; ++k) visit(k * shape_.channels, shape_.ring_of_tap[k]);
  }

  template <typename Sum>
  double ring_sum(int ring, const Sum& sum_at) const {
    double sum = 0;
    for_taps([&](int64_t at, int r) {
      if (r == ring) sum += sum_at(at);
    });
    return sum;
  }

  // Sums the squares of each ring, and of the weights times the metric, if asked for, times a power of two that keeps
  // them within float64, and returns that.
  double scaled_squares(double* weighed) {
    scaled_ = u_;
    sum_squares(weighed);
    if constexpr (sizeof(T) == 4) return 1;  // their squares are within float64
    bool safe = true;
    for (int r = 0; r < shape_.rings; ++r) safe = safe && squares_[r] > 1e-280 && squares_[r] < 1e280;
    const double size = safe ? 1 : largest(u_, shape_.numel());
    if (safe || !(size > 0) || size == kInfinity) return 1;
    int exponent;
    std::frexp(size, &exponent);
    const double scale = std::ldexp(1.0, -std::max(-1020, std::min(1020, exponent)));
    scaled_copy_.resize(shape_.numel());
    multiply(u_, shape_.numel(), static_cast<T>(scale), scaled_copy_.data());
    scaled_ = scaled_copy_.data();
    sum_squares(weighed);
    return scale;
  }

  void sum_squares(double* weighed) {
    if (shape_.channels_fastest) {
      for (int k = 0; k < shape_.taps; ++k) by_tap_[k] = squares(scaled_ + k * shape_.channels, shape_.channels);
    } else {
      tap_squares(scaled_, shape_.channels, shape_.taps, by_tap_.data());
    }
    add_by_ring(squares_);
    if (weighed == nullptr) return;
    for (int k = 0; k < shape_.taps; ++k) {
      const int64_t at = k * shape_.channels;
      by_tap_[k] = weighed_squares(scaled_ + at, d_ + at, shape_.channels);
    }
    add_by_ring(weighed);
  }

  void add_by_ring(double* sums) const {
    for (int r = 0; r < shape_.rings; ++r) sums[r] = 0;
    for (int k = 0; k < shape_.taps; ++k) sums[shape_.ring_of_tap[k]] += by_tap_[k];
  }

  // Of the metric's coefficients, relative.
  static constexpr double kTolerance = sizeof(T) == 4 ? 1e-11 : 2e-16;

  const Shape& shape_;
  Copy<T> u_copy_, d_copy_, out_copy_;
  std::vector<T> scaled_copy_;
  const T *u_ = nullptr, *d_ = nullptr, *scaled_ = nullptr;
  T* out_ = nullptr;
  double squares_[kMaxRings];
  std::vector<double> by_tap_;
  std::vector<T> factors_;
};

int64_t grain(const Shape& shape) { return std::max<int64_t>(1, kLeastShare / std::max<int64_t>(1, shape.numel())); }

}  // namespace

template <typename T>
void norms_cpu(const NormsCall& call) {
  run_parallel(call.parallel_for, call.shape.kernels, grain(call.shape), [&](int64_t begin, int64_t end) {
    Worker<T> worker(call.shape);
    for (int64_t o = begin; o < end; ++o) worker.norms(call.weight, o, call.norms + o * call.shape.rings);
  });
}

template <typename T>
void prox_cpu(const ProxCall& call) {
  run_parallel(call.parallel_for, call.shape.kernels, grain(call.shape), [&](int64_t begin, int64_t end) {
    Worker<T> worker(call.shape);
    for (int64_t o = begin; o < end; ++o) worker.prox(call, o);
  });
}

template void norms_cpu<float>(const NormsCall& call);
template void norms_cpu<double>(const NormsCall& call);
template void prox_cpu<float>(const ProxCall& call);
template void prox_cpu<double>(const ProxCall& call);

}  // namespace loco::ring_prox
