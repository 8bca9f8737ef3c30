// The optimizer step on the CPU. It does not use torch: it takes plain structs and updates memory in place.
#pragma once

#include <cstdint>
#include <vector>

#include "common/parallel.h"
#include "optim_step/tensor_step.h"

namespace loco::optim_step {

// A buffer that grows on demand and is reused. Each call of `of` invalidates what earlier calls returned.
class GrowingBuffer {
 public:
  // Returns uninitialised memory for `count` elements, aligned to a cache line.
  template <typename T>
  T* of(int64_t count) {
    const size_t lines = (count * sizeof(T) + sizeof(CacheLine) - 1) / sizeof(CacheLine);
    if (lines > lines_.size()) lines_ = std::vector<CacheLine>(lines);
    return reinterpret_cast<T*>(lines_.data());
  }

 private:
  // Memory is aligned to cache lines so that vectors do not straddle two of them.
  struct alignas(64) CacheLine {
    char bytes[64];
  };

  std::vector<CacheLine> lines_;
};

struct Call {
  const TensorStep* tensors;  // [count]
  int64_t count;
  const double* hyper;  // [groups, columns], contiguous; columns: SgdColumn or AdamColumn
  const double* lrs;    // [groups], learning rates that replace those in hyper; null: none
  Options options;
  double grad_scale;  // gradients are divided by it, also in memory; 0: none
  Rounding rounding;
  ParallelFor parallel_for;
  int64_t threads;  // the most that parallel_for uses
};

// Steps all tensors of a call. Rule: Sgd or Adam.
template <class Rule>
void step_cpu(const Call& call);

}  // namespace loco::optim_step
