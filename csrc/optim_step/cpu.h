// The optimizer step on the CPU, without torch: plain structs in, memory updated in place.
#pragma once

#include <cstdint>

#include "common/parallel.h"
#include "optim_step/tensor_step.h"

namespace loco::optim_step {

struct Call {
  const TensorStep* tensors;
  int64_t count;
  const double* hyper;  // [groups, columns], see SgdColumn and AdamColumn
  const double* lrs;    // [groups], which replace hyper's; null: none
  Options options;
  double grad_scale;  // 0: none; else gradients are divided by it, in memory too
  Rounding rounding;
  ParallelFor parallel_for;
  int64_t threads;  // that parallel_for uses at most
};

// Rule: Sgd or Adam.
template <class Rule>
void step_cpu(const Call& call);

// The instruction set that this machine's clones were chosen for.
const char* cpu_capability();

}  // namespace loco::optim_step
