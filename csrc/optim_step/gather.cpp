#include "optim_step/gather.h"

namespace loco::optim_step {
namespace {

void check_length(const char* name, size_t length, size_t expected) {
  STD_TORCH_CHECK(length == expected, name, ": expected ", expected, " entries, one per parameter, got ", length);
}

std::string text(const View& view) { return shape_text(view.sizes, view.ndim); }

}  // namespace

Gather::Gather(const Lists& lists, int columns, bool grads_written, bool logical) {
  const size_t count = lists.params.size();
  check_length("grads", lists.grads.size(), count);
  check_length("group_index", lists.group_index.size(), count);
  check_length("map_index", lists.map_index.size(), count);
  if (logical) check_length("ordinals", lists.ordinals.size(), count);
  const View hyper = view_of(lists.hyper, "hyper", 0);
  STD_TORCH_CHECK(hyper.dtype == DType::f64 && hyper.ndim == 2 && hyper.sizes[1] == columns && lists.hyper.is_contiguous(),
                  "hyper: expected a contiguous float64 tensor of shape (groups, ", columns, "), got shape ", text(hyper));
  hyper_ = static_cast<const double*>(hyper.data);
  steps_.resize(count);
  leads_.resize(count);
  regions_.reserve(count * (2 + kStates));
  names_.reserve(count * (2 + kStates));
  for (size_t i = 0; i < count; ++i) {
    TensorStep& step = steps_[i];
    Lead& lead = leads_[i];
    lead.view = view_of(lists.params[i], "params", i);
    STD_TORCH_CHECK(lead.view.ndim <= 64, "params[", i, "]: expected at most 64 dimensions, got ", lead.view.ndim);
    lead.axes = memory_order(lead.view.ndim, lead.view.sizes, lead.view.strides, lead.order);
    step.numel = lead.view.numel;
    add_operand(lead.view, "params", i, step.w);
    add_region(lead.view, "params", i, true);
    const View grad = view_of(lists.grads[i], "grads", i);
    add_operand(grad, "grads", i, step.g);
    add_region(grad, "grads", i, grads_written);
    for (Operand& state : step.state) state.data = nullptr;
    step.group = lists.group_index[i];
    STD_TORCH_CHECK(step.group >= 0 && step.group < hyper.sizes[0], "group_index[", i, "]: expected 0 to ", hyper.sizes[0] - 1,
                    ", got ", step.group);
    step.map = nullptr;
    if (const int64_t m = lists.map_index[i]; m != -1) {
      STD_TORCH_CHECK(m >= 0 && m < static_cast<int64_t>(lists.maps.size()), "map_index[", i, "]: expected -1 to ",
                      lists.maps.size() - 1, ", got ", m);
      set_map(lists.maps[m], i, m);
    }
    step.first = false;
    step.step = 0;
    step.ordinal = logical ? static_cast<uint32_t>(lists.ordinals[i]) : 0;
    if (!logical) continue;
    int64_t contiguous[64];
    for (int64_t d = lead.view.ndim - 1, stride = 1; d >= 0; stride *= lead.view.sizes[d--]) contiguous[d] = stride;
    STD_TORCH_CHECK(make_nest(lead.order, lead.axes, lead.view.sizes, contiguous, step.logical_nest), "params[", i,
                    "]: its strides are too irregular, at most ", kMaxAxes, " separate axes are supported");
  }
}

bool Gather::same_strides(const View& view, const Lead& lead) const {
  for (int k = 0; k < lead.axes; ++k) {
    const int d = lead.order[k];
    if (view.strides[d] != lead.view.strides[d]) return false;
  }
  return true;
}

void Gather::add_operand(const View& view, const char* list, size_t index, Operand& operand) {
  const Lead& lead = leads_[index];
  const bool same_shape = view.ndim == lead.view.ndim && std::equal(view.sizes, view.sizes + view.ndim, lead.view.sizes);
  STD_TORCH_CHECK(same_shape, list, "[", index, "]: expected the shape of params[", index, "], ", text(lead.view),
                  ", got ", text(view));
  operand.data = view.data;
  operand.dtype = view.dtype;
  STD_TORCH_CHECK(make_nest(lead.order, lead.axes, view.sizes, view.strides, operand.nest), list, "[", index,
                  "]: its strides are too irregular, at most ", kMaxAxes, " separate axes are supported");
}

void Gather::add_region(const View& view, const char* list, size_t index, bool written) {
  Region region{static_cast<const char*>(view.data), view.ndim,          view.sizes, view.strides,
                element_size(view.dtype),            written};
  const bool distinct = measure(region);
  STD_TORCH_CHECK(distinct || !written, list, "[", index, "]: some of its elements share memory (strides ",
                  shape_text(view.strides, view.ndim), "), it cannot be written");
  regions_.push_back(region);
  names_.emplace_back(list, index);
}

void Gather::set_map(const Tensor& map, size_t index, int64_t which) {
  const View view = view_of(map, "maps", which);
  const Lead& lead = leads_[index];
  STD_TORCH_CHECK(view.dtype == DType::f64, "maps[", which, "]: expected float64");
  int64_t strides[64];
  bool fits = view.ndim <= lead.view.ndim;
  for (int64_t d = 0; fits && d < lead.view.ndim; ++d) {
    const int64_t from = d - (lead.view.ndim - view.ndim);
    const bool broadcast = from < 0 || view.sizes[from] == 1;
    fits = broadcast || view.sizes[from] == lead.view.sizes[d];
    strides[d] = broadcast ? 0 : view.strides[from];
  }
  STD_TORCH_CHECK(fits, "maps[", which, "]: expected a shape that broadcasts to params[", index, "], ", text(lead.view),
                  ", got ", text(view));
  steps_[index].map = static_cast<const double*>(view.data);
  STD_TORCH_CHECK(make_nest(lead.order, lead.axes, lead.view.sizes, strides, steps_[index].map_nest), "maps[", which,
                  "]: its strides are too irregular, at most ", kMaxAxes, " separate axes are supported");
}

void Gather::add_state(const StateList& list) {
  const int slot = state_++;
  if (list.tensors.empty()) return;
  check_length(list.name, list.tensors.size(), steps_.size());
  for (size_t i = 0; i < steps_.size(); ++i) {
    const View view = view_of(list.tensors[i], list.name, i);
    add_operand(view, list.name, i, steps_[i].state[slot]);
    add_region(view, list.name, i, true);
  }
}

void Gather::add_steps(const Tensors& steps) {
  check_length("steps", steps.size(), steps_.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    const View view = view_of(steps[i], "steps", i);
    const bool valid = view.numel == 1 && (view.dtype == DType::f32 || view.dtype == DType::f64);
    STD_TORCH_CHECK(valid, "steps[", i, "]: expected one float32 or float64 element");
    counters_.push_back(view);
    steps_[i].step = 1 + (view.dtype == DType::f64 ? *static_cast<const double*>(view.data)
                                                   : *static_cast<const float*>(view.data));
    add_region(view, "steps", i, true);
  }
}

void Gather::count_steps() const {
  for (size_t i = 0; i < counters_.size(); ++i) {
    if (counters_[i].dtype == DType::f64) {
      *static_cast<double*>(counters_[i].data) = steps_[i].step;
    } else {
      *static_cast<float*>(counters_[i].data) = static_cast<float>(steps_[i].step);
    }
  }
}

void Gather::check_overlap() const {
  const Conflict conflict = find_conflict(regions_);
  if (conflict.first < 0) return;
  const auto& [list, index] = names_[conflict.first];
  const auto& [other_list, other_index] = names_[conflict.second];
  STD_TORCH_CHECK(false, list, "[", index, "] and ", other_list, "[", other_index,
                  "]: expected separate memory, got tensors that overlap");
}

}  // namespace loco::optim_step
