// What a step must know of each tensor, the same for every device.
#pragma once

#include <cstdint>

#include "common/operand.h"
#include "optim_step/rules.h"
#include "ring_prox/penalty.h"

namespace loco::optim_step {

// A parameter and everything that steps with it. All nests, which the caller owns, walk the elements in the parameter's
// memory order.
struct TensorStep {
  int64_t numel;
  Operand w, g, state[kStates];
  const double* map;  // null: uniform decay
  const Nest* map_nest;
  const Nest* logical_nest;  // the element's index in a contiguous tensor of the same shape; null: the same index
  int64_t group;             // row of hyper
  bool first;                // SGD: the momentum buffer is to be written, not read
  void* counter;             // Adam: steps made so far, in the device's memory; null: the rule counts none
  DType counter_dtype;       // f32 or f64
  double step;               // Adam: the number of this step, from 1; not set for a GPU, which reads counter itself
  const ring_prox::Penalty* penalty;  // whose prox ends the step; null: none
  int64_t kernels;                    // with a penalty: output channels, of numel / kernels consecutive elements each
  bool channels_fastest;              // with a penalty: within a kernel; else taps are
  uint32_t ordinal;                   // which parameter this is, for stochastic rounding
};

struct Rounding {
  bool stochastic;
  uint64_t seed;
  uint32_t step;
};

}  // namespace loco::optim_step
