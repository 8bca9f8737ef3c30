// Reads and checks every tensor of a step, then checks that no memory that is written overlaps any other.
#include "optim_step/gather.h"

#include <algorithm>
#include <utility>

namespace loco::optim_step {
namespace {

void check_length(const char* name, size_t length, size_t expected) {
  LOCO_CHECK(length == expected, name, ": expected ", expected, " entries, one per parameter, got ", length);
}

void check_length_unless_empty(const char* name, const Ints& list, size_t expected) {
  if (!list.empty()) check_length(name, list.size(), expected);
}

// Returns how many states each parameter has.
template <class Rule>
int state_count(const StepArgs& args) {
  const size_t params = args.params.size();
  const bool counts = Rule::counts_steps;
  const size_t least = !counts ? 0 : args.options.amsgrad ? 3 : 2, most = counts ? 3 : 1;
  const size_t count = params == 0 ? least : args.states.size() / params;
  LOCO_CHECK(least <= count && count <= most && count * params == args.states.size(), "states: expected ", least,
             " to ", most, " per parameter, got ", args.states.size(), " for ", params, " parameters");
  return static_cast<int>(count);
}

ring_prox::Penalty penalty_of(TensorRef tensor, size_t index) {
  const View view = view_of(tensor, "penalties", index);
  const auto* const values = static_cast<const double*>(view.data);
  const bool dense = view.dtype == DType::f64 && view.ndim == 1 && view.numel > 0 && view.strides[0] == 1;
  const int64_t taps = dense && values[0] >= 1 && values[0] < view.numel ? static_cast<int64_t>(values[0]) : 0;
  const int64_t rings = (view.numel - 1 - taps) / 2;
  LOCO_CHECK(taps > 0 && rings >= 1 && rings <= ring_prox::kMaxRings && 1 + taps + 2 * rings == view.numel,
             "penalties[", index, "]: expected a contiguous float64 tensor of a number of taps, the ring of each, ",
             "and two thresholds for each of 1 to ", ring_prox::kMaxRings, " rings");
  const double *const plain = values + 1 + taps, *const squared = plain + rings;
  ring_prox::Penalty penalty;
  for (const double* ring = values + 1; ring < plain; ++ring) {
    LOCO_CHECK(*ring >= 0 && *ring < rings, "penalties[", index, "]: expected rings from 0 to ", rings - 1, ", got ",
               *ring);
    penalty.ring_of_tap.push_back(static_cast<int>(*ring));
  }
  penalty.plain.assign(plain, squared);
  if (std::any_of(squared, squared + rings, [](double q) { return q != 0; })) {
    penalty.squared.assign(squared, squared + rings);
  }
  return penalty;
}

constexpr size_t kGrads = 1;          // place in the names of lists
constexpr uintptr_t kAlignment = 16;  // bytes, of vectors that kernels load

// Returns whether no two of the intervals share memory.
template <class Interval>
bool are_apart(std::vector<Interval> intervals) {
  std::sort(intervals.begin(), intervals.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  const char* end = nullptr;
  for (const Interval& interval : intervals) {
    if (interval.begin == interval.end) continue;
    if (interval.begin < end) return false;
    end = interval.end;
  }
  return true;
}

}  // namespace

template <class Rule>
void Gather::read(const StepArgs& args) {
  const size_t count = args.params.size();
  device_ = count > 0 ? device_of(args.params[0]) : DeviceId::cpu();
  check_length("grads", args.grads.size(), count);
  check_length_unless_empty("group_index", args.group_index, count);
  check_length_unless_empty("map_index", args.map_index, count);
  check_length_unless_empty("penalty_index", args.penalty_index, count);
  if (args.seed) check_length("ordinals", args.ordinals.size(), count);
  const int states = state_count<Rule>(args);
  check_length_unless_empty("first", args.first, states * count);
  read_hyper(args.hyper, Rule::columns);
  for (size_t i = 0; i < args.penalties.size(); ++i) penalties_.push_back(penalty_of(args.penalties[i], i));
  if (Rule::counts_steps) check_length("steps", args.steps.size(), count);
  if (args.shapes) check_shapes(args.params, *args.shapes);
  writes_grads_ = args.grad_scale.has_value();
  has_lrs_ = !args.lr_index.empty();
  steps_.resize(count);
  lists_ = {"params", "grads"};
  lists_.insert(lists_.end(), Rule::state_names, Rule::state_names + states);
  if (Rule::counts_steps) lists_.push_back("steps");
  regions_.reserve(lists_.size() * count);
  for (size_t i = 0; i < count; ++i) {
    read_param(args, i);
    const View grad = view_of(args.grads[i], "grads", i, device_);
    add_operand(grad, "grads", i, writes_grads_, steps_[i].g);
    for (int k = 0; k < states; ++k) {
      const char* const name = Rule::state_names[k];
      add_operand(view_of(args.states[k * count + i], name, i, device_), name, i, true, steps_[i].state[k]);
    }
    if (Rule::counts_steps) read_counter(args.steps[i], i);
  }
  check_overlap();
}

template void Gather::read<Sgd>(const StepArgs& args);
template void Gather::read<Adam>(const StepArgs& args);

void Gather::keep_gradients() {
  const size_t lists = lists_.size();
  for (size_t i = 0; i < regions_.size(); ++i) {
    const Region& region = regions_[i];
    if (i % lists == kGrads) {
      grad_layouts_.push_back(
          {{region.sizes, region.sizes + region.ndim}, {region.strides, region.strides + region.ndim}, region.bytes});
    } else if (region.bytes > 0) {
      written_.push_back({region.data, region.data + region.bytes});
    }
  }
  std::sort(written_.begin(), written_.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < written_.size(); ++i) written_[i].end = std::max(written_[i].end, written_[i - 1].end);
  regions_ = {};  // its sizes and strides belong to the tensors
  for (TensorStep& step : steps_) step.first = false;
}

bool Gather::read_again(const StepArgs& args, int columns) {
  if (args.grads.size() != steps_.size() || args.grad_scale.has_value() != writes_grads_) return false;
  if (args.lr_index.empty() == has_lrs_) return false;
  std::vector<Interval> grads;
  for (size_t i = 0; i < steps_.size(); ++i) {
    const View grad = view_of(args.grads[i], "grads", i, device_);
    if (!is_laid_out_as_before(grad, i)) return false;
    const auto* const begin = static_cast<const char*>(grad.data);
    grads.push_back({begin, begin + grad_layouts_[i].bytes});
    if (grad.data != steps_[i].g.data && !is_apart(grads.back())) return false;
  }
  if (writes_grads_ && !are_apart(grads)) return false;
  const int64_t groups = groups_;
  read_hyper(args.hyper, columns);
  const int64_t rows = std::exchange(groups_, groups);
  LOCO_CHECK(rows == groups, "hyper: expected ", groups, " rows, got ", rows);
  for (size_t i = 0; i < steps_.size(); ++i) steps_[i].g.data = const_cast<char*>(grads[i].begin);
  return true;
}

bool Gather::is_laid_out_as_before(const View& grad, size_t index) const {
  const GradLayout& layout = grad_layouts_[index];
  const Operand& before = steps_[index].g;
  const auto address = [](const void* data) { return reinterpret_cast<uintptr_t>(data); };
  const auto same = [&](const int64_t* extents, const std::vector<int64_t>& known) {
    return std::equal(extents, extents + grad.ndim, known.begin(), known.end());
  };
  return grad.dtype == before.dtype && same(grad.sizes, layout.sizes) && same(grad.strides, layout.strides) &&
         (address(grad.data) - address(before.data)) % kAlignment == 0;
}

// Returns whether the gradient shares no memory with what is written. Where strides leave gaps it may also return false
// for a gradient inside of them.
bool Gather::is_apart(const Interval& grad) const {
  const auto after = std::lower_bound(written_.begin(), written_.end(), grad.end,
                                      [](const Interval& known, const char* end) { return known.begin < end; });
  return after == written_.begin() || grad.begin >= (after - 1)->end || grad.begin == grad.end;
}

void Gather::read_hyper(const Tensor& hyper, int columns) {
  const View view = view_of(hyper, "hyper", 0);
  const bool fits = view.dtype == DType::f64 && view.ndim == 2 && view.sizes[1] == columns && hyper.is_contiguous();
  LOCO_CHECK(fits, "hyper: expected a contiguous float64 tensor of shape (groups, ", columns, "), got shape ",
             shape_text(view));
  hyper_ = static_cast<const double*>(view.data);
  groups_ = view.sizes[0];
}

void Gather::read_param(const StepArgs& args, size_t index) {
  TensorStep& step = steps_[index];
  lead_.view = view_of(args.params[index], "params", index, device_);
  LOCO_CHECK(lead_.view.ndim <= kMaxDims, "params[", index, "]: expected at most ", kMaxDims, " dimensions, got ",
             lead_.view.ndim);
  lead_.axes = memory_order(lead_.view.ndim, lead_.view.sizes, lead_.view.strides, lead_.order);
  step.numel = lead_.view.numel;
  add_operand(lead_.view, "params", index, true, step.w);
  step.group = read_index("group_index", args.group_index, index, 0, groups_);
  const int64_t map = read_index("map_index", args.map_index, index, -1, args.maps.size());
  if (map != -1) read_map(args.maps[map], index, map);
  const int64_t penalty = read_index("penalty_index", args.penalty_index, index, -1, penalties_.size());
  if (penalty != -1) read_penalty(index, penalty);
  step.first = !args.first.empty() && args.first[index] != 0;
  if (!args.seed) return;
  step.ordinal = static_cast<uint32_t>(args.ordinals[index]);
  int64_t contiguous[kMaxDims];
  for (int64_t d = lead_.view.ndim - 1, stride = 1; d >= 0; stride *= lead_.view.sizes[d--]) contiguous[d] = stride;
  step.logical_nest = keep_unless_flat(contiguous, "params", index);
}

void Gather::check_shapes(const TensorList& params, const Tensor& expected) {
  const View view = view_of(expected, "shapes", 0);
  LOCO_CHECK(view.dtype == DType::f64 && view.ndim == 1 && expected.is_contiguous(),
             "shapes: expected a contiguous float64 tensor of one dimension, got shape ", shape_text(view));
  const auto *next = static_cast<const double*>(view.data), *const end = next + view.numel;
  for (size_t i = 0; i < params.size(); ++i) {
    int64_t ndim, *sizes;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(params[i].handle, &ndim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(params[i].handle, &sizes));
    const bool fits = end - next > ndim && *next == ndim && std::equal(sizes, sizes + ndim, next + 1);
    LOCO_CHECK(fits, "params[", i, "]: expected the shape given in shapes, got ", shape_text(sizes, ndim));
    next += 1 + ndim;
  }
  LOCO_CHECK(next == end, "shapes: expected ", view.numel - (end - next), " numbers, got ", view.numel);
}

void Gather::read_map(TensorRef map, size_t index, int64_t which) {
  const View view = view_of(map, "maps", which);
  const View& param = lead_.view;
  LOCO_CHECK(view.dtype == DType::f64, "maps[", which, "]: expected float64");
  int64_t strides[kMaxDims];
  bool fits = view.ndim <= param.ndim;
  for (int64_t d = 0; fits && d < param.ndim; ++d) {
    const int64_t from = d - (param.ndim - view.ndim);
    const bool broadcast = from < 0 || view.sizes[from] == 1;
    fits = broadcast || view.sizes[from] == param.sizes[d];
    strides[d] = broadcast ? 0 : view.strides[from];
  }
  LOCO_CHECK(fits, "maps[", which, "]: expected a shape that broadcasts to params[", index, "], ", shape_text(param),
             ", got ", shape_text(view));
  TensorStep& step = steps_[index];
  step.map = static_cast<const double*>(view.data);
  step.map_nest = &nests_.emplace_back(nest_of(strides, "maps", which));
}

// Throws unless filters follow one another in memory, each with its taps or its channels fastest: these are the layouts
// that FilterSolver supports.
void Gather::read_penalty(size_t index, int64_t which) {
  const ring_prox::Penalty& penalty = penalties_[which];
  const View& view = lead_.view;
  int64_t taps = 1;
  for (int64_t d = 2; d < view.ndim; ++d) taps *= view.sizes[d];
  LOCO_CHECK(view.ndim >= 2 && taps == penalty.taps(), "penalties[", which, "]: expected params[", index,
             "] to have filters of ", penalty.taps(), " taps, got shape ", shape_text(view));
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
  const bool contiguous = std::equal(lead_.order, lead_.order + lead_.axes, taps_fastest);
  LOCO_CHECK(contiguous || std::equal(lead_.order, lead_.order + lead_.axes, channels_fastest), "params[", index,
             "]: expected a contiguous or channels_last weight where there is a penalty, got strides ",
             shape_text(view.strides, view.ndim));
  step.penalty = &penalty;
  step.filters = view.sizes[0];
  step.channels_fastest = !contiguous;
}

void Gather::read_counter(TensorRef counter, size_t index) {
  const View view = scalar_view(counter, "steps", index, device_);
  steps_[index].counter = view.data;
  steps_[index].counter_dtype = view.dtype;
  add_region(view, "steps", index, true);
}

void Gather::add_operand(const View& view, const char* list, size_t index, bool written, Operand& operand) {
  LOCO_CHECK(same_shape(view, lead_.view), list, "[", index, "]: expected the shape of params[", index, "], ",
             shape_text(lead_.view), ", got ", shape_text(view));
  operand.data = view.data;
  operand.dtype = view.dtype;
  operand.nest = keep_unless_flat(view.strides, list, index);
  add_region(view, list, index, written);
}

Nest Gather::nest_of(const int64_t* strides, const char* list, size_t index) const {
  Nest nest;
  LOCO_CHECK(make_nest(lead_.order, lead_.axes, lead_.view.sizes, strides, nest), list, "[", index,
             "]: its strides are too irregular, at most ", kMaxAxes, " separate axes are supported");
  return nest;
}

const Nest* Gather::keep_unless_flat(const int64_t* strides, const char* list, size_t index) {
  const Nest nest = nest_of(strides, list, index);
  return nest.flat() ? nullptr : &nests_.emplace_back(nest);
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
  LOCO_CHECK(distinct || !written, list, "[", index, "]: some of its elements share memory (strides ",
             shape_text(view.strides, view.ndim), "), it cannot be written");
  regions_.push_back(region);
}

void Gather::check_overlap() const {
  const Conflict conflict = find_conflict(regions_);
  if (conflict.first < 0) return;
  const auto name = [&](int64_t region) {
    const auto lists = static_cast<int64_t>(lists_.size());
    return lists_[region % lists] + ("[" + std::to_string(region / lists)) + "]";
  };
  LOCO_CHECK(false, name(conflict.first), " and ", name(conflict.second),
             ": expected separate memory, got tensors that overlap");
}

}  // namespace loco::optim_step
