// The prox of math.h and the ring norms on the CPU.
//
//   norms[o, r] = ||w(o, ring r)||_2
//   out[o] = argmin_x 1/2 sum_i d_i (x_i - w_i)^2 + sum_n t_n ||x(G_n)|| + (sum_n q_n ||x(G_n)||)^2
//
// weight, metric and out are [filters, channels, taps]; each has its own dtype, a stride between filters in elements
// and a nest of strides within one. norms is contiguous [filters, rings] in float64; thresholds and squared are float64
// [filters, rings] with a stride between rows, 0 if all filters share one.
//
// Filters are divided among threads, and each is handled by one thread from its first sum to its last weight, so the
// number of threads changes no bit. A filter is used in place if it is contiguous and already of the compute type;
// otherwise the thread works on a converted copy.
#include "ring_prox/cpu.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/staging.h"
#include "ring_prox/filter_solver.h"

namespace loco::ring_prox {
namespace {

constexpr int64_t kLeastShare = 16384;  // weights; waking a thread does not pay below that

// A filter as T, in place or in a copy.
template <typename T>
class Copy {
 public:
  // Return the weights of filter o, in the order of the nest.
  const T* load(const Filters& filters, int64_t o, int64_t count) {
    T* const values = place(filters, o, count);
    if (!in_place<T>(operand_)) stage_in(operand_, 0, count, values);
    return values;
  }

  // Return where to write filter o; done() then stores it to the tensor if that is a copy.
  T* place(const Filters& filters, int64_t o, int64_t count) {
    const Operand& all = filters.operand;
    operand_ = {element(all, o * filters.stride), all.dtype, all.nest};
    if (in_place<T>(operand_)) return static_cast<T*>(operand_.data);
    values_.resize(count);
    return values_.data();
  }

  void done() const {
    if (!in_place<T>(operand_)) stage_out(operand_, 0, static_cast<int64_t>(values_.size()), values_.data());
  }

 private:
  Operand operand_{};
  std::vector<T> values_;
};

int64_t grain(const Shape& shape) { return std::max<int64_t>(1, kLeastShare / std::max<int64_t>(1, shape.numel())); }

}  // namespace

template <typename T>
void norms_cpu(const Call& call, double* norms) {
  const int64_t numel = call.shape.numel();
  run_parallel(call.parallel_for, call.filters, grain(call.shape), [&](int64_t begin, int64_t end) {
    FilterSolver<T> solver(call.shape);
    Copy<T> weight;
    for (int64_t o = begin; o < end; ++o) {
      solver.norms(weight.load(call.weight, o, numel), norms + o * call.shape.rings);
    }
  });
}

template <typename T>
void prox_cpu(const Call& call) {
  const int64_t numel = call.shape.numel();
  run_parallel(call.parallel_for, call.filters, grain(call.shape), [&](int64_t begin, int64_t end) {
    FilterSolver<T> solver(call.shape);
    Copy<T> weight, metric, out;
    for (int64_t o = begin; o < end; ++o) {
      const T* u = weight.load(call.weight, o, numel);
      const T* d = call.metric.operand.data ? metric.load(call.metric, o, numel) : nullptr;
      const int64_t at = o * call.thresholds_stride;
      const Thresholds thresholds{call.thresholds + at, call.squared ? call.squared + at : nullptr};
      solver.prox(u, d, thresholds, call.linf, out.place(call.out, o, numel));
      out.done();
    }
  });
}

template void norms_cpu<float>(const Call& call, double* norms);
template void norms_cpu<double>(const Call& call, double* norms);
template void prox_cpu<float>(const Call& call);
template void prox_cpu<double>(const Call& call);

}  // namespace loco::ring_prox
