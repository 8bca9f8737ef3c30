// Implements torch.ops.loco_ext.optim_step, optim_step_hold and optim_step_again, whose schemas are in schemas.h, the
// same way for every device.
#pragma once

#include "optim_step/held.h"

namespace loco::optim_step {

// Device::step<Rule>(gather, args, prepared) makes the step of tensors that have been read and checked, and returns
// without a value.
template <class Device>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  const StepArgs args = unpack(stack);
  Held<Device>(args).step(args);
}

template <class Device>
void boxed_hold(StableIValue* stack, uint64_t, uint64_t) {
  StepArgs args = unpack(stack);
  auto held = std::make_unique<Held<Device>>(args);
  held->step(args);
  held->keep(std::move(args.maps));
  stack[0] = torch::stable::detail::from(HeldSteps<Device>::own(std::move(held)));
}

template <class Device>
void boxed_again(StableIValue* stack, uint64_t, uint64_t) {
  AgainArgs again = unpack_again(stack);
  stack[0] = torch::stable::detail::from(HeldSteps<Device>::of(again.held).step_again(again.args, again.check));
}

template <class Device>
void implement(torch::stable::detail::StableLibrary& library) {
  library.impl("optim_step", &boxed<Device>);
  library.impl("optim_step_hold", &boxed_hold<Device>);
  library.impl("optim_step_again", &boxed_again<Device>);
}

}  // namespace loco::optim_step
