// Reads the arguments of torch.ops.loco_ext.optim_step off the stack of a boxed call.
#include "optim_step/step_args.h"

namespace loco::optim_step {
namespace {

// Takes one argument after another.
struct Stack {
  StableIValue* next;

  template <typename T>
  void take(T& argument) {
    argument = torch::stable::detail::to<T>(*next++);
  }
  void take(TensorList& list) { list = TensorList(*next++); }
  void take(RuleId& rule) {
    const auto id = torch::stable::detail::to<int64_t>(*next++);
    LOCO_CHECK(id == 0 || id == 1, "rule: expected 0 (SGD) or 1 (Adam), got ", id);
    rule = static_cast<RuleId>(id);
  }
  void take(Options& options) {
    std::vector<bool> flags;
    take(flags);
    LOCO_CHECK(flags.size() == 5, "flags: expected maximize, l1, nesterov, amsgrad and decoupled, got ", flags.size(),
               " entries");
    options = {flags[0], flags[1], flags[2], flags[3], flags[4]};
  }
};

}  // namespace

StepArgs unpack(StableIValue* stack) {
  StepArgs a;
  Stack from{stack};
  const auto take = [&](auto&... arguments) { (from.take(arguments), ...); };
  take(a.rule, a.options, a.params, a.grads, a.states, a.steps, a.first, a.hyper, a.group_index, a.lrs, a.lr_index,
       a.maps, a.map_index, a.penalties, a.penalty_index, a.grad_scale, a.found_inf, a.ordinals, a.seed,
       a.rounding_step, a.shapes);
  return a;
}

AgainArgs unpack_again(StableIValue* stack) {
  AgainArgs again{};
  StepArgs& a = again.args;
  Stack from{stack};
  const auto take = [&](auto&... arguments) { (from.take(arguments), ...); };
  take(again.cached, a.grads, a.hyper, a.lrs, a.lr_index, a.grad_scale, a.found_inf, again.check);
  return again;
}

int64_t read_index(const char* name, const Ints& list, size_t at, int64_t least, int64_t count) {
  const int64_t index = list.empty() ? least : list[at];
  LOCO_CHECK(index >= least && index < count, name, "[", at, "]: expected ", least, " to ", count - 1, ", got ", index);
  return index;
}

std::vector<View> read_lrs(const StepArgs& args, int64_t groups, const DeviceId& device) {
  const Ints& index = args.lr_index;
  if (index.empty()) return {};
  LOCO_CHECK(static_cast<int64_t>(index.size()) == groups, "lr_index: expected ", groups,
             " entries, one per row of hyper, or none, got ", index.size());
  std::vector<View> result(groups, View{});
  for (int64_t i = 0; i < groups; ++i) {
    const int64_t lr = read_index("lr_index", index, i, -1, args.lrs.size());
    if (lr != -1) result[i] = scalar_view(args.lrs[lr], "lrs", lr, device);
  }
  return result;
}

}  // namespace loco::optim_step
