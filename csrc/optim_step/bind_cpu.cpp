// torch.ops.loco_ext.optim_step_sgd and optim_step_adam on CPU tensors. Schemas: library.cpp.
#include "optim_step/gather.h"

namespace loco::optim_step {
namespace {

struct Scaling {
  bool skip;          // found_inf is set: nothing may change
  double grad_scale;  // 0: none
};

Scaling read_scaling(const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf) {
  const bool skip = found_inf && scalar_of(*found_inf, "found_inf") != 0;
  const double scale = grad_scale ? scalar_of(*grad_scale, "grad_scale") : 0;
  STD_TORCH_CHECK(!grad_scale || scale != 0, "grad_scale: expected a number other than 0");
  return {skip, scale};
}

template <class StepCall>
void fill_call(StepCall& call, Gather& gather, const Scaling& scaling, bool maximize, bool l1,
               std::optional<int64_t> seed, int64_t rounding_step) {
  call.tensors = gather.steps().data();
  call.count = static_cast<int64_t>(gather.steps().size());
  call.hyper = gather.hyper();
  call.maximize = maximize;
  call.l1 = l1;
  call.grad_scale = scaling.grad_scale;
  call.rounding = {seed.has_value(), static_cast<uint64_t>(seed.value_or(0)), static_cast<uint32_t>(rounding_step)};
  call.parallel_for = parallel_for;
}

void optim_step_sgd(Tensors params, Tensors grads, Tensors momentum_buffers, Ints first, Ints group_index, Tensor hyper,
                    Tensors maps, Ints map_index, bool nesterov, bool maximize, bool l1, std::optional<Tensor> grad_scale,
                    std::optional<Tensor> found_inf, Ints ordinals, std::optional<int64_t> seed,
                    int64_t rounding_step) {
  const Scaling scaling = read_scaling(grad_scale, found_inf);
  Gather gather({params, grads, group_index, hyper, maps, map_index, ordinals}, kSgdColumns, grad_scale.has_value(),
                seed.has_value());
  gather.add_state({"momentum_buffers", momentum_buffers});
  STD_TORCH_CHECK(first.size() == momentum_buffers.size(), "first: expected ", momentum_buffers.size(),
                  " entries, one per momentum buffer, got ", first.size());
  for (size_t i = 0; i < first.size(); ++i) gather.steps()[i].first = first[i] != 0;
  gather.check_overlap();
  if (scaling.skip) return;
  SgdCall call;
  fill_call(call, gather, scaling, maximize, l1, seed, rounding_step);
  call.nesterov = nesterov;
  step_cpu(call);
}

void optim_step_adam(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors max_exp_avg_sqs,
                     Tensors steps, Ints group_index, Tensor hyper, Tensors maps, Ints map_index, bool amsgrad, bool maximize,
                     bool decoupled, bool l1, std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf,
                     Ints ordinals, std::optional<int64_t> seed, int64_t rounding_step) {
  const Scaling scaling = read_scaling(grad_scale, found_inf);
  Gather gather({params, grads, group_index, hyper, maps, map_index, ordinals}, kAdamColumns, grad_scale.has_value(),
                seed.has_value());
  const bool complete = exp_avgs.size() == params.size() && exp_avg_sqs.size() == params.size() &&
                        (!amsgrad || max_exp_avg_sqs.size() == params.size());
  STD_TORCH_CHECK(complete, "exp_avgs, exp_avg_sqs, max_exp_avg_sqs: expected one entry per parameter");
  gather.add_state({"exp_avgs", exp_avgs});
  gather.add_state({"exp_avg_sqs", exp_avg_sqs});
  gather.add_state({"max_exp_avg_sqs", max_exp_avg_sqs});
  gather.add_steps(steps);
  gather.check_overlap();
  if (scaling.skip) return;
  gather.count_steps();
  AdamCall call;
  fill_call(call, gather, scaling, maximize, l1, seed, rounding_step);
  call.amsgrad = amsgrad;
  call.decoupled = decoupled;
  step_cpu(call);
}

}  // namespace
}  // namespace loco::optim_step

STABLE_TORCH_LIBRARY_IMPL(loco_ext, CPU, m) {
  m.impl("optim_step_sgd", TORCH_BOX(&loco::optim_step::optim_step_sgd));
  m.impl("optim_step_adam", TORCH_BOX(&loco::optim_step::optim_step_adam));
}
