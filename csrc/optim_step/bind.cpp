// Reads the arguments of the optim_step operators, the same way for every device.
#include "optim_step/bind.h"

namespace loco::optim_step {
namespace {

constexpr Layout kSgdLayout{{"momentum_buffers", "", ""}, kSgdColumns};
constexpr Layout kAdamLayout{{"exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"}, kAdamColumns};

void check_per_parameter(const char* name, const Tensors& list, const Lists& lists) {
  STD_TORCH_CHECK(list.size() == lists.params.size(), name, ": expected ", lists.params.size(),
                  " entries, one per parameter, got ", list.size());
}

void read(Gather& gather, const Lists& lists, const Tensors& grads, const Arguments& a, const Layout& layout) {
  gather.read(lists, grads, a.hyper, layout, a.grad_scale.has_value(), a.seed.has_value());
}

}  // namespace

template <>
void read_step<Sgd>(Gather& gather, const Lists& lists, const Tensors& grads, const Arguments& arguments) {
  const Ints& first = arguments.first;
  const size_t buffers = lists.states[0].size();
  STD_TORCH_CHECK(first.empty() || first.size() == buffers, "first: expected ", buffers,
                  " entries, one per momentum buffer, or none, got ", first.size());
  read(gather, lists, grads, arguments, kSgdLayout);
  for (size_t i = 0; i < first.size(); ++i) gather.steps()[i].first = first[i] != 0;
}

template <>
void read_step<Adam>(Gather& gather, const Lists& lists, const Tensors& grads, const Arguments& arguments) {
  for (int k = 0; k < (arguments.options.amsgrad ? 3 : 2); ++k) {
    check_per_parameter(kAdamLayout.state_names[k], lists.states[k], lists);
  }
  check_per_parameter("steps", lists.steps, lists);
  read(gather, lists, grads, arguments, kAdamLayout);
}

std::vector<View> read_lrs(const Arguments& arguments, int64_t groups, const Place& place) {
  const Ints& index = arguments.lr_index;
  if (index.empty()) return {};
  STD_TORCH_CHECK(static_cast<int64_t>(index.size()) == groups, "lr_index: expected ", groups,
                  " entries, one per row of hyper, or none, got ", index.size());
  const auto count = static_cast<int64_t>(arguments.lrs.size());
  std::vector<View> result(groups, View{});
  for (int64_t i = 0; i < groups; ++i) {
    if (index[i] == -1) continue;
    STD_TORCH_CHECK(index[i] >= 0 && index[i] < count, "lr_index[", i, "]: expected -1 to ", count - 1, ", got ",
                    index[i]);
    result[i] = scalar_view(arguments.lrs[index[i]], "lrs", index[i], place);
  }
  return result;
}

}  // namespace loco::optim_step
