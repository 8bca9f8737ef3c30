// Describes the tensors of a step, the same way for every device.
#pragma once

#include <cstdint>

#include "common/operand.h"
#include "optim_step/rules.h"
#include "ring_prox/penalty.h"

namespace loco::optim_step {

// A parameter and its operands. All nests walk the elements in the parameter's memory order; the caller owns them.
struct TensorStep {
  int64_t numel;
  Operand w, g, state[kStates];  // [numel] each
  const double* map;             // decay map, broadcast by strides of 0; null: uniform decay
  const Nest* map_nest;          // offsets of the elements' values in map
  const Nest* logical_nest;      // elements' indices in a contiguous tensor of the same shape; null: unchanged
  int64_t group;                 // row of hyper
  bool first;                    // SGD: the momentum buffer is written without being read
  void* counter;                 // Adam: one element, steps made so far, in device memory; null: the rule counts none
  DType counter_dtype;           // f32 or f64
  double step;  // Adam: number of this step, from 1; not set for GPU kernels, which read counter themselves
  const ring_prox::Penalty* penalty;  // its prox ends the step; null: none
  int64_t filters;                    // with a penalty: number of filters, each of numel / filters consecutive elements
  bool channels_fastest;              // with a penalty: channels vary fastest in a filter; else taps do
  uint32_t ordinal;                   // identifies the parameter, for stochastic rounding

  // Returns the shape of a filter, with a penalty.
  ring_prox::Shape shape() const {
    const int64_t channels = numel / filters / penalty->taps();
    return {channels, penalty->taps(), penalty->rings(), penalty->ring_of_tap.data(), channels_fastest};
  }
};

// Stochastic rounding draws from Philox with this seed and step.
struct Rounding {
  bool stochastic;
  uint64_t seed;
  uint32_t step;

  LOCO_HD PhiloxKey key(uint32_t ordinal) const {
    return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), ordinal, step};
  }
};

}  // namespace loco::optim_step
