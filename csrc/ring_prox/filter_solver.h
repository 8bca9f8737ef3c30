// Norms and prox of one filter (one output channel's weights) in contiguous memory.
#pragma once

#include <cstdint>
#include <vector>

#include "ring_prox/math.h"
#include "ring_prox/rows.h"

namespace loco::ring_prox {

// The shape of a filter and the ring of each of its weights.
struct Shape {
  int64_t channels;
  int taps, rings;
  const int* ring_of_tap;  // [taps], in memory order
  bool channels_fastest;   // whether channels, rather than taps, are fastest in memory

  int64_t numel() const { return channels * taps; }
};

// Solver for filters of one shape, one after the other; it keeps its buffers between them. T is float or double.
template <typename T>
class FilterSolver {
 public:
  explicit FilterSolver(const Shape& shape);

  // Write the norm of each ring of u. norms is [rings], ring 0 the outermost.
  void norms(const T* u, double* norms);
  // Write the minimiser that math.h describes. d may be null, and out may be u.
  void prox(const T* u, const T* d, const Thresholds& thresholds, bool linf, T* out);

 private:
  // A run of weights and the index of its first weight.
  struct Part {
    int64_t at;
    Run run;
  };

  struct alignas(64) Line {
    double values[8];
  };

  void divide();
  void prox_l2(const Thresholds& thresholds, const Scale& scale, T* out);
  void prox_in_metric(const Thresholds& thresholds, const Scale& scale, T* out);
  void find_caps(const Thresholds& thresholds, double* caps);
  void point_to(const T* u, const T* d) { u_ = u, d_ = d; }
  bool transposes() const { return !shape_.channels_fastest; }
  void transpose_channels();
  void find_coefficients(const double* inverses, const double* t, int first, double* coefficients, double* left);
  template <typename Visit>
  void for_taps(const Visit& visit) const;
  void set_infinite_metrics_aside(double* floors);
  void measure(double* sizes) const;
  struct AllWeights;
  template <typename Visit>
  void for_weights(const Visit& visit) const;
  void leave_unscaled();
  Scale scaled_sums();
  bool all_safe(bool zeros) const;
  void sum_up(bool wide);
  int first_alive(const double* t);
  void weigh();
  void sum_moments(bool wide, const double* c, Moments& to);
  bool products_safe() const;
  void bring_near_one();

  Shape shape_;
  std::vector<Part> parts_;
  std::vector<int32_t> ring_of_lane_;
  std::vector<int64_t> ring_of_long_lane_;
  std::vector<Line> lanes_;
  const T *u_ = nullptr, *d_ = nullptr, *scaled_ = nullptr, *scaled_d_ = nullptr;
  double weighed_[kMaxRings];
  bool weighed_is_known_ = false;
  Scale scale_;           // the scale of scaled_ and scaled_d_
  bool moderate_ = true;  // whether all sums with a metric are in the range that MetricModel can use
  double weighed_scale_ = 1;
  Moments zero_;  // moments for c = 0; without a metric, only the squares
  std::vector<T> scaled_copy_, scaled_d_copy_, finite_d_, transposed_u_, transposed_d_;
};

}  // namespace loco::ring_prox
