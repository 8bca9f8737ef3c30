// Reads and checks every tensor of a step, then checks that no memory that is written overlaps any other.
#include "optim_step/gather.h"

#include "common/registry.h"

namespace loco::optim_step {
namespace {

void check_length(const char* name, size_t length, size_t expected) {
  STD_TORCH_CHECK(length == expected, name, ": expected ", expected, " entries, one per parameter, got ", length);
}

// Prefetches what view_of will read. These loops are so short that the processor waits for the cache lines of many
// tensors at a time, whereas the loops that check the tensors one by one would wait for each.
void bring_near(const Tensors& tensors) {
  for (const Tensor& tensor : tensors) __builtin_prefetch(tensor.get());
  for (const Tensor& tensor : tensors) {
    void* data;
    int64_t* strides;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &data));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
    __builtin_prefetch(strides);
  }
}

std::string text(const View& view) { return shape_text(view.sizes, view.ndim); }

}  // namespace

void Gather::read(const Lists& lists, const Tensors& grads, const Tensor& hyper, const Layout& layout,
                  bool grads_written, bool logical) {
  const size_t count = lists.params.size();
  place_ = count > 0 ? place_of(lists.params[0]) : Place::cpu();
  bring_near(grads);
  bring_near(lists.params);
  for (const Tensors& states : lists.states) bring_near(states);
  bring_near(lists.steps);
  check_length("grads", grads.size(), count);
  check_length("group_index", lists.group_index.size(), count);
  check_length("map_index", lists.map_index.size(), count);
  if (!lists.penalties.empty()) check_length("penalties", lists.penalties.size(), count);
  if (logical) check_length("ordinals", lists.ordinals.size(), count);
  read_hyper(hyper, layout.columns);
  steps_.resize(count);
  leads_.resize(count);
  for (size_t i = 0; i < count; ++i) {
    read_param(lists, i, logical);
    add_operand(view_of(grads[i], "grads", i, place_), "grads", i, grads_written, steps_[i].g);
  }
  read_states(lists, layout);
  if (!lists.steps.empty()) read_steps(lists.steps);
  check_overlap();
}

void Gather::read_hyper(const Tensor& hyper, int columns) {
  const View view = view_of(hyper, "hyper", 0);
  const bool fits = view.dtype == DType::f64 && view.ndim == 2 && view.sizes[1] == columns && hyper.is_contiguous();
  STD_TORCH_CHECK(fits, "hyper: expected a contiguous float64 tensor of shape (groups, ", columns, "), got shape ",
                  text(view));
  hyper_ = static_cast<const double*>(view.data);
  groups_ = view.sizes[0];
}

void Gather::read_param(const Lists& lists, size_t index, bool logical) {
  TensorStep& step = steps_[index];
  Lead& lead = leads_[index];
  lead.view = view_of(lists.params[index], "params", index, place_);
  STD_TORCH_CHECK(lead.view.ndim <= kMaxDims, "params[", index, "]: expected at most ", kMaxDims, " dimensions, got ",
                  lead.view.ndim);
  lead.axes = memory_order(lead.view.ndim, lead.view.sizes, lead.view.strides, lead.order);
  step.numel = lead.view.numel;
  add_operand(lead.view, "params", index, true, step.w);
  for (Operand& state : step.state) state.data = nullptr;
  step.group = lists.group_index[index];
  STD_TORCH_CHECK(step.group >= 0 && step.group < groups_, "group_index[", index, "]: expected 0 to ", groups_ - 1,
                  ", got ", step.group);
  step.map = nullptr;
  step.map_nest = nullptr;
  if (const int64_t which = lists.map_index[index]; which != -1) {
    const int64_t maps = static_cast<int64_t>(lists.maps.size());
    STD_TORCH_CHECK(which >= 0 && which < maps, "map_index[", index, "]: expected -1 to ", maps - 1, ", got ", which);
    read_map(lists.maps[which], index, which);
  }
  step.penalty = nullptr;
  if (!lists.penalties.empty() && lists.penalties[index] != 0) read_penalty(lists.penalties, index);
  step.first = false;
  step.counter = nullptr;
  step.step = 0;
  step.ordinal = 0;
  step.logical_nest = nullptr;
  if (!logical) return;
  step.ordinal = static_cast<uint32_t>(lists.ordinals[index]);
  int64_t contiguous[kMaxDims];
  for (int64_t d = lead.view.ndim - 1, stride = 1; d >= 0; stride *= lead.view.sizes[d--]) contiguous[d] = stride;
  step.logical_nest = keep_unless_flat(lead, contiguous, "params", index);
}

void Gather::read_map(const Tensor& map, size_t index, int64_t which) {
  const View view = view_of(map, "maps", which);
  const View& param = leads_[index].view;
  STD_TORCH_CHECK(view.dtype == DType::f64, "maps[", which, "]: expected float64");
  int64_t strides[kMaxDims];
  bool fits = view.ndim <= param.ndim;
  for (int64_t d = 0; fits && d < param.ndim; ++d) {
    const int64_t from = d - (param.ndim - view.ndim);
    const bool broadcast = from < 0 || view.sizes[from] == 1;
    fits = broadcast || view.sizes[from] == param.sizes[d];
    strides[d] = broadcast ? 0 : view.strides[from];
  }
  STD_TORCH_CHECK(fits, "maps[", which, "]: expected a shape that broadcasts to params[", index, "], ", text(param),
                  ", got ", text(view));
  TensorStep& step = steps_[index];
  step.map = static_cast<const double*>(view.data);
  step.map_nest = keep_nest(leads_[index], strides, "maps", which);
}

// Requires filters to lie one after another, each with its taps or its channels fastest: the layouts that KernelSolver
// supports.
void Gather::read_penalty(const Ints& penalties, size_t index) {
  const auto held = std::dynamic_pointer_cast<const ring_prox::HeldPenalty>(find_kept(penalties[index]));
  STD_TORCH_CHECK(held, "penalties[", index, "]: expected 0 or a number from ring_penalty_hold, got ",
                  penalties[index]);
  const ring_prox::Penalty& penalty = held->penalty;
  const Lead& lead = leads_[index];
  const View& view = lead.view;
  int64_t taps = 1;
  for (int64_t d = 2; d < view.ndim; ++d) taps *= view.sizes[d];
  STD_TORCH_CHECK(view.ndim >= 2 && taps == penalty.taps(), "penalties[", index, "]: expected params[", index,
                  "] to have kernels of ", penalty.taps(), " taps, got shape ", text(view));
  TensorStep& step = steps_[index];
  if (step.numel == 0) return;
  int8_t taps_fastest[kMaxDims], channels_fastest[kMaxDims];
  int count = 0, other = 0;
  const auto add = [&](int8_t* order, int& at, int64_t d) {
    if (view.sizes[d] != 1) order[at++] = static_cast<int8_t>(d);
  };
  add(channels_fastest, other, 1);
  for (int64_t d = view.ndim - 1; d >= 0; --d) {
    add(taps_fastest, count, d);
    if (d != 1) add(channels_fastest, other, d);
  }
  const bool contiguous = std::equal(lead.order, lead.order + lead.axes, taps_fastest);
  STD_TORCH_CHECK(contiguous || std::equal(lead.order, lead.order + lead.axes, channels_fastest), "params[", index,
                  "]: expected a contiguous or channels_last weight where there is a penalty, got strides ",
                  shape_text(view.strides, view.ndim));
  step.penalty = &penalty;
  step.kernels = view.sizes[0];
  step.channels_fastest = !contiguous;
  penalties_.push_back(held);
}

void Gather::read_states(const Lists& lists, const Layout& layout) {
  for (int k = 0; k < kStates; ++k) {
    const Tensors& list = lists.states[k];
    if (list.empty()) continue;
    check_length(layout.state_names[k], list.size(), steps_.size());
    for (size_t i = 0; i < list.size(); ++i) {
      const View view = view_of(list[i], layout.state_names[k], i, place_);
      add_operand(view, layout.state_names[k], i, true, steps_[i].state[k]);
    }
  }
}

void Gather::read_steps(const Tensors& steps) {
  check_length("steps", steps.size(), steps_.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    const View view = scalar_view(steps[i], "steps", i, place_);
    steps_[i].counter = view.data;
    steps_[i].counter_dtype = view.dtype;
    add_region(view, "steps", i, true);
  }
}

void Gather::add_operand(const View& view, const char* list, size_t index, bool written, Operand& operand) {
  const Lead& lead = leads_[index];
  const bool same_shape =
      view.ndim == lead.view.ndim && std::equal(view.sizes, view.sizes + view.ndim, lead.view.sizes);
  STD_TORCH_CHECK(same_shape, list, "[", index, "]: expected the shape of params[", index, "], ", text(lead.view),
                  ", got ", text(view));
  operand.data = view.data;
  operand.dtype = view.dtype;
  operand.nest = keep_unless_flat(lead, view.strides, list, index);
  add_region(view, list, index, written);
}

const Nest* Gather::keep_nest(const Lead& lead, const int64_t* strides, const char* list, size_t index) {
  Nest& nest = nests_.emplace_back();
  STD_TORCH_CHECK(make_nest(lead.order, lead.axes, lead.view.sizes, strides, nest), list, "[", index,
                  "]: its strides are too irregular, at most ", kMaxAxes, " separate axes are supported");
  return &nest;
}

const Nest* Gather::keep_unless_flat(const Lead& lead, const int64_t* strides, const char* list, size_t index) {
  const Nest* nest = keep_nest(lead, strides, list, index);
  if (!nest->flat()) return nest;
  nests_.pop_back();
  return nullptr;
}

void Gather::add_region(const View& view, const char* list, size_t index, bool written) {
  Region region{};
  region.data = static_cast<const char*>(view.data);
  region.ndim = view.ndim;
  region.sizes = view.sizes;
  region.strides = view.strides;
  region.element_size = element_size(view.dtype);
  region.written = written;
  const bool distinct = measure(region);
  STD_TORCH_CHECK(distinct || !written, list, "[", index, "]: some of its elements share memory (strides ",
                  shape_text(view.strides, view.ndim), "), it cannot be written");
  regions_.push_back(region);
  names_.emplace_back(list, index);
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
