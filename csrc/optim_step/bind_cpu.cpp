// Implements torch.ops.loco_ext.optim_step for CPU tensors.
#include "optim_step/bind.h"
#include "optim_step/cpu.h"

namespace loco::optim_step {
namespace {

// Returns the gradient scale, or 0 if there is none.
double read_grad_scale(const StepArgs& args) {
  if (!args.grad_scale) return 0;
  const double scale = value_of(scalar_view(*args.grad_scale, "grad_scale", 0));
  LOCO_CHECK(scale != 0, "grad_scale: expected a number other than 0");
  return scale;
}

bool found_inf(const StepArgs& args) {
  return args.found_inf && value_of(scalar_view(*args.found_inf, "found_inf", 0)) != 0;
}

// Returns the learning rate of each row of hyper, shape [groups], or nothing if all are the rows' own.
std::vector<double> merged_lrs(const StepArgs& args, const double* hyper, int64_t groups, int columns) {
  std::vector<double> result;
  for (const View& view : read_lrs(args, groups, DeviceId::cpu())) {
    result.push_back(view.data ? value_of(view) : hyper[result.size() * columns]);
  }
  return result;
}

struct Cpu {
  struct Prepared {};

  template <class Rule>
  static void step(Gather& gather, const StepArgs& args, Prepared&) {
    LOCO_CHECK(gather.device().type == DeviceId::cpu().type, "params[0]: expected a tensor on cpu, got one on ",
               device_text(gather.device()));
    std::vector<TensorStep>& steps = gather.steps();
    Call call;
    call.grad_scale = read_grad_scale(args);
    const std::vector<double> lrs = merged_lrs(args, gather.hyper(), gather.groups(), Rule::columns);
    if (found_inf(args)) return;
    for (TensorStep& step : steps) {
      if (step.counter) step.step = count_step(step.counter, step.counter_dtype == DType::f64);
    }
    call.tensors = steps.data();
    call.count = static_cast<int64_t>(steps.size());
    call.hyper = gather.hyper();
    call.lrs = lrs.empty() ? nullptr : lrs.data();
    call.options = args.options;
    call.rounding = args.rounding();
    call.parallel_for = parallel_for;
    call.threads = num_threads();
    step_cpu<Rule>(call);
  }
};

}  // namespace
}  // namespace loco::optim_step

STABLE_TORCH_LIBRARY_IMPL(loco_ext, CPU, m) { loco::optim_step::implement<loco::optim_step::Cpu>(m); }
