// The arguments of torch.ops.loco_ext.optim_step. The operator has one schema for all rules; this is where it is read.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/tensor_list.h"
#include "optim_step/tensor_step.h"

namespace loco::optim_step {

using Ints = std::vector<int64_t>;

// Lists have one entry per parameter unless stated otherwise. hyper, maps, penalties and shapes are float64 on the CPU,
// all other tensors on the device of the first parameter.
struct StepArgs {
  RuleId rule;
  Options options;
  TensorList params, grads;
  TensorList states;     // [state, parameter], one state after the other: SGD 0 or 1, Adam 2, or 3 with amsgrad
  TensorList steps;      // one element each: steps made so far; empty if the rule counts none
  Ints first;            // 1: the momentum buffer is written without being read; empty: all are read
  Tensor hyper;          // [groups, columns]
  Ints group_index;      // row of hyper; empty: row 0
  TensorList lrs;        // one element each, learning rates
  Ints lr_index;         // [groups], index into lrs; -1: the row of hyper holds the rate; empty: all rows do
  TensorList maps;       // decay maps
  Ints map_index;        // index into maps; -1: uniform decay; empty: uniform for all
  TensorList penalties;  // each [1 + taps + 2 * rings]: the number of taps, the ring of each tap, t and q of each ring
  Ints penalty_index;    // index into penalties; -1: none; empty: none at all
  std::optional<Tensor> grad_scale, found_inf;
  Ints ordinals;  // read only for stochastic rounding
  std::optional<int64_t> seed;
  int64_t rounding_step = 0;
  std::optional<Tensor> shapes;  // expected of the parameters: number of dimensions and sizes, one after the other

  Rounding rounding() const {
    return {seed.has_value(), static_cast<uint64_t>(seed.value_or(0)), static_cast<uint32_t>(rounding_step)};
  }
};

// Takes the arguments, in the schema's order, off the stack of a boxed call.
StepArgs unpack(StableIValue* stack);

// The arguments of torch.ops.loco_ext.optim_step_again; args has those that a cached step reads anew.
struct AgainArgs {
  Tensor cached;
  StepArgs args;
  bool check;
};

AgainArgs unpack_again(StableIValue* stack);

// Returns entry `at` of a list of indices, or `least` if the list is empty; throws unless it is from least to count
// - 1.
int64_t read_index(const char* name, const Ints& list, size_t at, int64_t least, int64_t count);

// Returns a view of each group's entry in lrs, shape [groups]. Its data is null if the group has none. The result is
// empty if lr_index is.
std::vector<View> read_lrs(const StepArgs& args, int64_t groups, const DeviceId& device);

}  // namespace loco::optim_step
