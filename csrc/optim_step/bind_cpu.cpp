// torch.ops.loco_ext.optim_step_sgd and optim_step_adam on CPU tensors, and their held variants. Schemas: library.cpp.
//
// A step over hundreds of small tensors costs more in handing over the tensors than in arithmetic. optim_step_hold
// takes those that stay the same (parameters, states) once; the held variants then take only the gradients.
#include <mutex>

#include "common/registry.h"
#include "optim_step/gather.h"

namespace loco::optim_step {
namespace {

constexpr Layout kSgdLayout{{"momentum_buffers", "", ""}, kSgdColumns};
constexpr Layout kAdamLayout{{"exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"}, kAdamColumns};

struct Held : Kept {
  std::mutex mutex;
  Lists lists;
  Gather gather;
};

// The arguments that every rule has.
struct Options {
  bool maximize, l1;
  std::optional<Tensor> grad_scale, found_inf;
  std::optional<int64_t> seed;
  int64_t rounding_step;
};

double read_grad_scale(const Options& options) {
  if (!options.grad_scale) return 0;
  const double scale = scalar_of(*options.grad_scale, "grad_scale");
  STD_TORCH_CHECK(scale != 0, "grad_scale: expected a number other than 0");
  return scale;
}

// Reads the lists and fills what all rules share; false if found_inf is set, so that nothing may change.
bool prepare(Gather& gather, const Lists& lists, const Tensors& grads, const Tensor& hyper, const Layout& layout,
             const Options& options, Call& call) {
  call.grad_scale = read_grad_scale(options);
  gather.read(lists, grads, hyper, layout, options.grad_scale.has_value(), options.seed.has_value());
  call.tensors = gather.steps().data();
  call.count = static_cast<int64_t>(gather.steps().size());
  call.hyper = gather.hyper();
  call.maximize = options.maximize;
  call.l1 = options.l1;
  const auto seed = static_cast<uint64_t>(options.seed.value_or(0));
  call.rounding = {options.seed.has_value(), seed, static_cast<uint32_t>(options.rounding_step)};
  call.parallel_for = parallel_for;
  call.threads = num_threads();
  return !(options.found_inf && scalar_of(*options.found_inf, "found_inf") != 0);
}

void step_sgd(Gather& gather, const Lists& lists, const Tensors& grads, const Ints& first, const Tensor& hyper,
              bool nesterov, const Options& options) {
  const size_t buffers = lists.states[0].size();
  STD_TORCH_CHECK(first.empty() || first.size() == buffers, "first: expected ", buffers,
                  " entries, one per momentum buffer, or none, got ", first.size());
  SgdCall call;
  if (!prepare(gather, lists, grads, hyper, kSgdLayout, options, call)) return;
  for (size_t i = 0; i < first.size(); ++i) gather.steps()[i].first = first[i] != 0;
  call.nesterov = nesterov;
  step_cpu(call);
}

void step_adam(Gather& gather, const Lists& lists, const Tensors& grads, const Tensor& hyper, bool amsgrad,
               bool decoupled, const Options& options) {
  for (int k = 0; k < (amsgrad ? 3 : 2); ++k) {
    STD_TORCH_CHECK(lists.states[k].size() == lists.params.size(), kAdamLayout.state_names[k], ": expected ",
                    lists.params.size(), " entries, one per parameter, got ", lists.states[k].size());
  }
  STD_TORCH_CHECK(lists.steps.size() == lists.params.size(), "steps: expected ", lists.params.size(),
                  " entries, one per parameter, got ", lists.steps.size());
  AdamCall call;
  if (!prepare(gather, lists, grads, hyper, kAdamLayout, options, call)) return;
  gather.count_steps();
  call.amsgrad = amsgrad;
  call.decoupled = decoupled;
  step_cpu(call);
}

std::shared_ptr<Held> find_held(int64_t hold) {
  const auto held = std::dynamic_pointer_cast<Held>(find_kept(hold));
  STD_TORCH_CHECK(held, "hold: expected a number from optim_step_hold, got ", hold);
  return held;
}

void optim_step_sgd(Tensors params, Tensors grads, Tensors momentum_buffers, Ints first, Ints group_index, Tensor hyper,
                    Tensors maps, Ints map_index, bool nesterov, bool maximize, bool l1,
                    std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf, Ints ordinals,
                    std::optional<int64_t> seed, int64_t rounding_step) {
  const Lists lists{params, {momentum_buffers, {}, {}}, {}, group_index, maps, map_index, ordinals};
  Gather gather;
  step_sgd(gather, lists, grads, first, hyper, nesterov, {maximize, l1, grad_scale, found_inf, seed, rounding_step});
}

void optim_step_adam(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors max_exp_avg_sqs,
                     Tensors steps, Ints group_index, Tensor hyper, Tensors maps, Ints map_index, bool amsgrad,
                     bool maximize, bool decoupled, bool l1, std::optional<Tensor> grad_scale,
                     std::optional<Tensor> found_inf, Ints ordinals, std::optional<int64_t> seed,
                     int64_t rounding_step) {
  const Lists lists{params, {exp_avgs, exp_avg_sqs, max_exp_avg_sqs}, steps, group_index, maps, map_index, ordinals};
  Gather gather;
  const Options options{maximize, l1, grad_scale, found_inf, seed, rounding_step};
  step_adam(gather, lists, grads, hyper, amsgrad, decoupled, options);
}

int64_t optim_step_hold(Tensors params, Tensors state0, Tensors state1, Tensors state2, Tensors steps, Ints group_index,
                        Tensors maps, Ints map_index, Ints ordinals) {
  auto held = std::make_shared<Held>();
  held->lists = {params, {state0, state1, state2}, steps, group_index, maps, map_index, ordinals};
  return keep(std::move(held));
}

void optim_step_sgd_held(int64_t hold, Tensors grads, Tensor hyper, bool nesterov, bool maximize, bool l1,
                         std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf, std::optional<int64_t> seed,
                         int64_t rounding_step) {
  const auto held = find_held(hold);
  const std::lock_guard<std::mutex> lock(held->mutex);
  step_sgd(held->gather, held->lists, grads, {}, hyper, nesterov,
           {maximize, l1, grad_scale, found_inf, seed, rounding_step});
}

void optim_step_adam_held(int64_t hold, Tensors grads, Tensor hyper, bool amsgrad, bool maximize, bool decoupled,
                          bool l1, std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf,
                          std::optional<int64_t> seed, int64_t rounding_step) {
  const auto held = find_held(hold);
  const std::lock_guard<std::mutex> lock(held->mutex);
  step_adam(held->gather, held->lists, grads, hyper, amsgrad, decoupled,
            {maximize, l1, grad_scale, found_inf, seed, rounding_step});
}

}  // namespace
}  // namespace loco::optim_step

STABLE_TORCH_LIBRARY_IMPL(loco_ext, CPU, m) {
  m.impl("optim_step_sgd", TORCH_BOX(&loco::optim_step::optim_step_sgd));
  m.impl("optim_step_adam", TORCH_BOX(&loco::optim_step::optim_step_adam));
  m.impl("optim_step_hold", TORCH_BOX(&loco::optim_step::optim_step_hold));
  m.impl("optim_step_sgd_held", TORCH_BOX(&loco::optim_step::optim_step_sgd_held));
  m.impl("optim_step_adam_held", TORCH_BOX(&loco::optim_step::optim_step_adam_held));
}
