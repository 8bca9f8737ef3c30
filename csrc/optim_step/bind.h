// Defines the optim_step operators, shared by all devices. Their schemas are in schemas.h.
#pragma once

#include <optional>

#include "optim_step/gather.h"

namespace loco::optim_step {

// Arguments of an operator other than its gradients and what Lists holds.
struct Arguments {
  Options options;
  Tensor hyper;   // [groups, columns]
  Tensors lrs;    // one-element tensors on the parameters' device
  Ints lr_index;  // [groups], index into lrs; -1: the row of hyper holds the rate; empty: all rows do
  Ints first;     // SGD: one per momentum buffer, 1: it is written without being read; empty: all are read
  std::optional<Tensor> grad_scale, found_inf;
  std::optional<int64_t> seed;
  int64_t rounding_step;

  Rounding rounding() const {
    return {seed.has_value(), static_cast<uint64_t>(seed.value_or(0)), static_cast<uint32_t>(rounding_step)};
  }
};

// Reads the lists into `gather` and makes the checks specific to the rule.
template <class Rule>
void read_step(Gather& gather, const Lists& lists, const Tensors& grads, const Arguments& arguments);

// Returns a view of each group's entry in lrs, shape [groups]. Its data is null if the group has none. The result is
// empty if lr_index is.
std::vector<View> read_lrs(const Arguments& arguments, int64_t groups, const Place& place);

// Implements the operators for a device: Device::step<Rule>(gather, lists, arguments) executes the step that `gather`
// has read.
template <class Device>
struct Operators {
  static void sgd(Tensors params, Tensors grads, Tensors momentum_buffers, Ints first, Ints group_index, Tensor hyper,
                  Tensors lrs, Ints lr_index, Tensors maps, Ints map_index, Ints penalties, bool nesterov,
                  bool maximize, bool l1, std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf,
                  Ints ordinals, std::optional<int64_t> seed, int64_t rounding_step) {
    const Lists lists{params, {momentum_buffers, {}, {}}, {}, group_index, maps, map_index, penalties, ordinals};
    step<Sgd>(lists, grads,
              {{maximize, l1, nesterov, false, false},
               hyper,
               lrs,
               lr_index,
               first,
               grad_scale,
               found_inf,
               seed,
               rounding_step});
  }

  static void adam(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors max_exp_avg_sqs,
                   Tensors steps, Ints group_index, Tensor hyper, Tensors lrs, Ints lr_index, Tensors maps,
                   Ints map_index, Ints penalties, bool amsgrad, bool maximize, bool decoupled, bool l1,
                   std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf, Ints ordinals,
                   std::optional<int64_t> seed, int64_t rounding_step) {
    const Lists lists{params,  {exp_avgs, exp_avg_sqs, max_exp_avg_sqs}, steps, group_index, maps, map_index, penalties,
                      ordinals};
    step<Adam>(lists, grads,
               {{maximize, l1, false, amsgrad, decoupled},
                hyper,
                lrs,
                lr_index,
                {},
                grad_scale,
                found_inf,
                seed,
                rounding_step});
  }

  static void implement(torch::stable::detail::StableLibrary& m) {
    m.impl("optim_step_sgd", TORCH_BOX(&Operators::sgd));
    m.impl("optim_step_adam", TORCH_BOX(&Operators::adam));
  }

 private:
  template <class Rule>
  static void step(const Lists& lists, const Tensors& grads, const Arguments& arguments) {
    Gather gather;
    read_step<Rule>(gather, lists, grads, arguments);
    Device::template step<Rule>(gather, lists, arguments);
  }
};

}  // namespace loco::optim_step
