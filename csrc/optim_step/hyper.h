// Reads the hyper-parameters of a step for a GPU table.
#pragma once

#include <optional>

#include "optim_step/gather.h"
#include "optim_step/gpu_table.h"

namespace loco::optim_step {

inline DeviceScalar device_scalar(const View& view) { return {view.data, view.dtype == DType::f64}; }

inline Hyper read_hyper(const Gather& gather, const StepArgs& args, int columns) {
  Hyper hyper{gather.hyper(), gather.groups(), columns, {}};
  for (const View& view : read_lrs(args, hyper.groups, gather.device())) hyper.lrs.push_back(device_scalar(view));
  return hyper;
}

}  // namespace loco::optim_step
