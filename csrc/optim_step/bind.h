// Implements torch.ops.loco_ext.optim_step, optim_step_cached and optim_step_again, whose schemas are in schemas.h, the
// same way for every device.
#pragma once

#include "optim_step/cached_step.h"
#include "optim_step/gpu_table.h"

namespace loco::optim_step {

inline DeviceScalar device_scalar(const View& view) { return {view.data, view.dtype == DType::f64}; }

// Reads the hyper-parameters of a step for a GPU table.
inline Hyper read_hyper(const Gather& gather, const StepArgs& args, int columns) {
  Hyper hyper{gather.hyper(), gather.groups(), columns, {}};
  for (const View& view : read_lrs(args, hyper.groups, gather.device())) hyper.lrs.push_back(device_scalar(view));
  return hyper;
}

// Device::step<Rule>(gather, args, prepared) makes the step of tensors that have been read and checked, and returns
// without a value.
template <class Device>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  const StepArgs args = unpack(stack);
  CachedStep<Device>(args).step(args);
}

// Makes a step and returns it for further ones.
template <class Device>
std::unique_ptr<CachedStep<Device>> make_cached(StableIValue* stack) {
  StepArgs args = unpack(stack);
  auto cached = std::make_unique<CachedStep<Device>>(args);
  cached->step(args);
  cached->keep(std::move(args.maps));
  return cached;
}

template <class Device>
void boxed_cached(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = torch::stable::detail::from(CachedSteps<Device>::own(make_cached<Device>(stack)));
}

template <class Device>
void boxed_again(StableIValue* stack, uint64_t, uint64_t) {
  AgainArgs again = unpack_again(stack);
  stack[0] = torch::stable::detail::from(CachedSteps<Device>::of(again.cached).step_again(again.args, again.check));
}

template <class Device>
void implement(torch::stable::detail::StableLibrary& library) {
  library.impl("optim_step", &boxed<Device>);
  library.impl("optim_step_cached", &boxed_cached<Device>);
  library.impl("optim_step_again", &boxed_again<Device>);
}

}  // namespace loco::optim_step
