// The optimizer step on the CPU. It does not use torch: it takes plain structs and updates memory in place.
#pragma once

#include <cstdint>

#include "common/parallel.h"
#include "optim_step/tensor_step.h"

namespace loco::optim_step {

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
