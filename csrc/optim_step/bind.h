// The operators of the family, the same for every device. Schemas: schemas.h.
//
// A step over hundreds of small tensors costs more in handing over the tensors than in arithmetic. optim_step_hold
// takes those that stay the same (parameters, states) once; the held variants then take only the gradients.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "common/registry.h"
#include "optim_step/gather.h"

namespace loco::optim_step {

// Arguments that change from step to step, beside the gradients.
struct Arguments {
  Options options;
  Tensor hyper;
  Tensors lrs;    // one-element tensors, on the parameters' device
  Ints lr_index;  // of each group's entry in lrs, -1: its row of hyper has it; empty: all rows have theirs
  Ints first;     // SGD: 1 where the momentum buffer is to be written, not read; empty: nowhere
  std::optional<Tensor> grad_scale, found_inf;
  std::optional<int64_t> seed;
  int64_t rounding_step;

  Rounding rounding() const {
    return {seed.has_value(), static_cast<uint64_t>(seed.value_or(0)), static_cast<uint32_t>(rounding_step)};
  }
};

// Lets gather read the lists, with the rule's own checks.
template <class Rule>
void read_step(Gather& gather, const Lists& lists, const Tensors& grads, const Arguments& arguments);

// For each group a view of its entry in lrs, its data null where there is none; empty if no group has one.
std::vector<View> read_lrs(const Arguments& arguments, int64_t groups, const Place& place);

// Device: step<Rule>(Memory&, gather, lists, arguments) makes the step that gather has read; what Memory keeps, it
// keeps from one held step to the next.
template <class Device>
struct Operators {
  struct Held : Kept {
    std::mutex mutex;
    Lists lists;
    Gather gather;
    typename Device::Memory memory;
  };

  static void sgd(Tensors params, Tensors grads, Tensors momentum_buffers, Ints first, Ints group_index, Tensor hyper,
                  Tensors lrs, Ints lr_index, Tensors maps, Ints map_index, Ints penalties, bool nesterov,
                  bool maximize, bool l1, std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf,
                  Ints ordinals, std::optional<int64_t> seed, int64_t rounding_step) {
    const Lists lists{params, {momentum_buffers, {}, {}}, {}, group_index, maps, map_index, penalties, ordinals};
    step_once<Sgd>(lists, grads,
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
    step_once<Adam>(lists, grads,
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

  static int64_t hold(Tensors params, Tensors state0, Tensors state1, Tensors state2, Tensors steps, Ints group_index,
                      Tensors maps, Ints map_index, Ints penalties, Ints ordinals) {
    auto held = std::make_shared<Held>();
    held->lists = {params, {state0, state1, state2}, steps, group_index, maps, map_index, penalties, ordinals};
    return keep(std::move(held));
  }

  static void sgd_held(int64_t hold, Tensors grads, Tensor hyper, Tensors lrs, Ints lr_index, bool nesterov,
                       bool maximize, bool l1, std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf,
                       std::optional<int64_t> seed, int64_t rounding_step) {
    step_held<Sgd>(
        hold, grads,
        {{maximize, l1, nesterov, false, false}, hyper, lrs, lr_index, {}, grad_scale, found_inf, seed, rounding_step});
  }

  static void adam_held(int64_t hold, Tensors grads, Tensor hyper, Tensors lrs, Ints lr_index, bool amsgrad,
                        bool maximize, bool decoupled, bool l1, std::optional<Tensor> grad_scale,
                        std::optional<Tensor> found_inf, std::optional<int64_t> seed, int64_t rounding_step) {
    step_held<Adam>(hold, grads,
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
    m.impl("optim_step_hold", TORCH_BOX(&Operators::hold));
    m.impl("optim_step_sgd_held", TORCH_BOX(&Operators::sgd_held));
    m.impl("optim_step_adam_held", TORCH_BOX(&Operators::adam_held));
  }

 private:
  template <class Rule>
  static void step_once(const Lists& lists, const Tensors& grads, const Arguments& arguments) {
    Gather gather;
    typename Device::Memory memory;
    step<Rule>(memory, gather, lists, grads, arguments);
  }

  template <class Rule>
  static void step_held(int64_t hold, const Tensors& grads, const Arguments& arguments) {
    const auto held = std::dynamic_pointer_cast<Held>(find_kept(hold));
    STD_TORCH_CHECK(held, "hold: expected a number from optim_step_hold, got ", hold);
    const std::lock_guard<std::mutex> lock(held->mutex);
    step<Rule>(held->memory, held->gather, held->lists, grads, arguments);
  }

  template <class Rule>
  static void step(typename Device::Memory& memory, Gather& gather, const Lists& lists, const Tensors& grads,
                   const Arguments& arguments) {
    read_step<Rule>(gather, lists, grads, arguments);
    Device::template step<Rule>(memory, gather, lists, arguments);
  }
};

}  // namespace loco::optim_step
