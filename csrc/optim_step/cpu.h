// The optimizer step on the CPU, without torch: plain structs in, memory updated in place.
#pragma once

#include <cstdint>
#include <vector>

#include "common/parallel.h"
#include "optim_step/tensor_step.h"

namespace loco::optim_step {

// Grows, and is used for one thing after the other.
class Memory {
 public:
  template <typename T>
  T* of(int64_t count) {
    const size_t lines = (count * sizeof(T) + sizeof(CacheLine) - 1) / sizeof(CacheLine);
    if (lines > lines_.size()) lines_ = std::vector<CacheLine>(lines);
    return reinterpret_cast<T*>(lines_.data());
  }

 private:
  // Vectors do not straddle two of them where memory begins with one.
  struct alignas(64) CacheLine {
    char bytes[64];
  };

  std::vector<CacheLine> lines_;
};

// For one parameter at a time whose kernels are shrunk together.
struct LayerMemory {
  Memory weights, metrics, sums, shares;
};

struct Call {
  const TensorStep* tensors;
  int64_t count;
  const double* hyper;  // [groups, columns], see SgdColumn and AdamColumn
  const double* lrs;    // [groups], which replace hyper's; null: none
  Options options;
  double grad_scale;  // 0: none; else gradients are divided by it, in memory too
  Rounding rounding;
  ParallelFor parallel_for;
  int64_t threads;            // that parallel_for uses at most
  LayerMemory* layer_memory;  // where there is a parameter whose kernels are shrunk together
};

// Rule: Sgd or Adam.
template <class Rule>
void step_cpu(const Call& call);

// The instruction set that this machine's clones were chosen for.
const char* cpu_capability();

}  // namespace loco::optim_step
