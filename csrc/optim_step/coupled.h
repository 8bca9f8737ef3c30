// The CPU step of a parameter with a coupled penalty (ring_prox/penalty.h), whose filters share a shrinkage factor: all
// filters are updated and their ring sums computed before the search for the factor begins.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "optim_step/cpu.h"
#include "optim_step/shrinkage.h"

namespace loco::optim_step {

// Filters of one parameter that are shrunk together. weights and metrics are [filters, numel], sums [filters,
// sum_count], shares [filters], all contiguous and in call.layer_memory; weights are used in place if they can be. T:
// the compute dtype.
template <class Rule, typename T>
class Layer {
 public:
  Layer(const Call& call, const TensorStep& tensor, double lr)
      : call_(call), tensor_(tensor), lr_(lr), numel_(tensor.numel / tensor.kernels) {
    LayerMemory& memory = *call.layer_memory;
    weights_ = in_place<T>(tensor.w) ? static_cast<T*>(tensor.w.data) : memory.weights.template of<T>(tensor.numel);
    metrics_ = Rule::has_metric ? memory.metrics.template of<T>(tensor.numel) : nullptr;
    sum_count_ = shrinkage().sum_count();
    sums_ = memory.sums.template of<double>(tensor.kernels * sum_count_);
    shares_ = memory.shares.template of<double>(tensor.kernels);
  }

  T* weights() const { return weights_; }
  T* metrics() const { return metrics_; }
  T* weights(int64_t kernel) const { return weights_ + kernel * numel_; }
  T* metrics(int64_t kernel) const { return metrics_ ? metrics_ + kernel * numel_ : nullptr; }
  double* sums(int64_t kernel) const { return sums_ + kernel * sum_count_; }

  // Calls body(filter, shrinkage) for each filter, in parallel.
  template <class Body>
  void for_kernels(const Body& body) const {
    constexpr int64_t kLeastShare = 16384;  // in weights; waking a thread for fewer costs more than it saves
    const int64_t grain = std::max<int64_t>(1, kLeastShare / numel_);
    run_parallel(call_.parallel_for, tensor_.kernels, grain, [&](int64_t begin, int64_t end) {
      Shrinkage<Rule, T> shrinks = shrinkage();
      for (int64_t k = begin; k < end; ++k) {
        body(k, shrinks);
      }
    });
  }

  // Searches for the factor that shrinks all filters, and returns it. Shares are added up by one thread, in order.
  double factor() const {
    ring_prox::FactorSearch search;
    for (int i = 0; i < ring_prox::kMostTrials; ++i) {
      for_kernels([&](int64_t k, Shrinkage<Rule, T>& shrinks) {
        shares_[k] = shrinks.share(weights(k), metrics(k), sums(k), search.at());
      });
      double sum = 0;
      for (int64_t k = 0; k < tensor_.kernels; ++k) sum += shares_[k];
      if (search.take(sum, std::numeric_limits<T>::epsilon())) break;
    }
    return search.best();
  }

 private:
  Shrinkage<Rule, T> shrinkage() const { return {tensor_, call_.hyper + tensor_.group * Rule::columns, lr_}; }

  const Call& call_;
  const TensorStep& tensor_;
  double lr_;
  int64_t numel_, sum_count_;
  T *weights_, *metrics_;
  double *sums_, *shares_;
};

}  // namespace loco::optim_step
