// Norms and prox of one kernel (output channel) that lies in contiguous memory.
#pragma once

#include <cstdint>
#include <vector>

#include "ring_prox/math.h"

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

  // norms: [rings], ring 0 the outermost.
  void norms(const T* u, double* norms);
  // The minimiser that math.h describes; d may be null, out may be u.
  void prox(const T* u, const T* d, const Thresholds& thresholds, bool linf, T* out);

 private:
  void solve(const Thresholds& thresholds, bool linf);
  void solve_l2(const Thresholds& thresholds);
  void solve_metric(const Thresholds& thresholds);
  void solve_linf(const Thresholds& thresholds);
  template <typename Visit>
  void for_taps(const Visit& visit) const;
  void measure(double* sizes) const;
  double scaled_squares(double* weighed);
  bool safe() const;
  double bring_near_one();
  void sum_squares(bool wide);
  void add_by_ring(double* sums) const;

  Shape shape_;
  const T *u_ = nullptr, *d_ = nullptr, *scaled_ = nullptr;
  T* out_ = nullptr;
  double squares_[kMaxRings];
  std::vector<double> by_tap_;
  std::vector<T> factors_, scaled_copy_, turned_u_, turned_d_;
};

}  // namespace loco::ring_prox
