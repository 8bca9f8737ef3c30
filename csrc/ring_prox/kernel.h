// Norms and prox of one kernel (output channel) that lies in contiguous memory.
#pragma once

#include <cstdint>
#include <vector>

#include "ring_prox/math.h"
#include "ring_prox/rows.h"

namespace loco::ring_prox {

// Which ring each weight of a kernel belongs to.
struct Shape {
  int64_t channels;
  int taps, rings;
  const int* ring_of_tap;  // in the order in which the taps lie
  bool channels_fastest;   // in memory; else taps are

  int64_t numel() const { return channels * taps; }
};

// Works on kernels of one shape, one after the other; keeps its memory meanwhile. T: float or double.
template <typename T>
class KernelSolver {
 public:
  explicit KernelSolver(const Shape& shape);

  // A run of weights and where it begins.
  struct Part {
    int64_t at;
    Run run;
  };

  // norms: [rings], ring 0 the outermost.
  void norms(const T* u, double* norms);
  // The minimiser that math.h describes; d may be null, out may be u.
  void prox(const T* u, const T* d, const Thresholds& thresholds, bool linf, T* out);
  // The same with l2 norms, for one who has summed up the rings: to no_sums() has been added, for every part, what
  // moments() adds without c, or without a metric what squares() does, as power[0].
  void prox_of_summed(const T* u, const T* d, const Thresholds& thresholds, T* out);
  Moments& no_sums();
  // The same for one who comes back to each of several kernels: the sums, of which there are sum_count, in a metric or
  // without, from the weights to where they are kept and back.
  void sum(const T* u, const T* d);
  int sum_count(bool in_metric) const { return shape_.rings * (in_metric ? Moments::kPowers : 1); }
  void keep_sums(bool in_metric, double* to) const;
  void take_sums(bool in_metric, const double* from);
  // sum_n q_n ||x(G_n)|| of the prox with thresholds t + factor q.
  double penalty_of_summed(const T* u, const T* d, const Thresholds& thresholds, double factor);
  double linf_penalty(const T* u, const T* d, const Thresholds& thresholds, double factor);
  const std::vector<Part>& parts() const { return parts_; }

 private:
  struct alignas(64) Line {
    double values[8];
  };

  void divide();
  void prox_l2(const Thresholds& thresholds, const Scale& scale, T* out);
  void prox_plain(const Thresholds& thresholds, const Scale& scale, T* out);
  // Each calls use(solve, penalty, found), which are as solve_squared takes them.
  template <class Use>
  void with_l2(const Thresholds& thresholds, const Scale& scale, const Use& use);
  template <class Use>
  void with_metric(const Thresholds& thresholds, const Scale& scale, const Use& use);
  template <class Use>
  void with_linf(const Thresholds& thresholds, const Use& use);
  void turn_to(const T* u, const T* d) { u_ = u, d_ = d; }
  bool turned() const { return !shape_.channels_fastest; }
  void turn_channels();
  void find_coefficients(const double* norms, const double* t, int first, double* coefficients);
  template <typename Visit>
  void for_taps(const Visit& visit) const;
  void set_infinite_metrics_aside(double* floors);
  void measure(double* sizes) const;
  struct DirectSums;
  template <typename Visit>
  void for_weights(const Visit& visit) const;
  void leave_unscaled();
  Scale scaled_sums(bool summed);
  bool all_safe(bool zeros) const;
  void sum_up(bool wide);
  int first_alive(const double* t);
  void weigh();
  void sum_moments(bool wide, const double* c, Moments& to);
  bool safe(const double* sums, int first) const;
  bool finite(const Moments& moments, int first) const;
  bool products_safe() const;
  void bring_near_one();

  Shape shape_;
  std::vector<Part> parts_;
  std::vector<int32_t> ring_of_lane_;
  std::vector<int64_t> ring_of_long_lane_;
  std::vector<Line> lanes_;
  const T *u_ = nullptr, *d_ = nullptr, *scaled_ = nullptr, *scaled_d_ = nullptr;
  double squares_[kMaxRings], weighed_[kMaxRings];
  int first_ = 0;  // ring that does not vanish in a metric
  bool weighed_is_known_ = false;
  Scale scale_;           // of scaled_ and scaled_d_
  bool moderate_ = true;  // models know all sums in a metric
  double weighed_scale_ = 1;
  Moments zero_, moments_;  // for c = 0, of which without a metric only squares are summed, and for the latest
  std::vector<T> scaled_copy_, scaled_d_copy_, finite_d_, turned_u_, turned_d_;
};

}  // namespace loco::ring_prox
