// Implements torch.ops.loco_ext.optim_step, whose schema is in schemas.h, the same way for every device.
#pragma once

#include "optim_step/gather.h"

namespace loco::optim_step {

// Reads and checks the arguments on the stack, then calls Device::step<Rule>(gather, args), which executes the step and
// returns without a value.
template <class Device>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  const StepArgs args = unpack(stack);
  Gather gather;
  if (args.rule == RuleId::sgd) {
    gather.read<Sgd>(args);
    Device::template step<Sgd>(gather, args);
  } else {
    gather.read<Adam>(args);
    Device::template step<Adam>(gather, args);
  }
}

}  // namespace loco::optim_step
