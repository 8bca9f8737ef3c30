// A parameter whose kernels are shrunk together (ring_prox/penalty.h), on the CPU: all have been updated and summed up
// before the factor that they share is searched.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "optim_step/cpu.h"
#include "optim_step/shrinkage.h"

namespace loco::optim_step {

// T: the type that arithmetic is done in.
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

  // In parallel: body(kernel, what shrinks it).
  template <class Body>
  void for_kernels(const Body& body) const {
    constexpr int64_t kLeastShare = 16384;  // weights; a thread with fewer is not worth waking
    const int64_t grain = std::max<int64_t>(1, kLeastShare / numel_);
    run_parallel(call_.parallel_for, tensor_.kernels, grain, [&](int64_t begin, int64_t end) {
      Shrinkage<Rule, T> shrinks = shrinkage();
      for (int64_t k = begin; k < end; ++k) {
        body(k, shrinks);
      }
    });
  }

  // By which all kernels are to be shrunk.
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
