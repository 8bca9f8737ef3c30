#include "optim_step/gpu_table.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace loco::optim_step {
namespace {

constexpr int64_t kAlignment = 16;

// Elements before the first that lies at a 16-byte boundary.
int64_t head_of(const TensorStep& t) {
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.w.data) % kAlignment);
  return std::min((kAlignment - past) % kAlignment / element_size(t.w.dtype), t.numel);
}

bool reaches_boundary(const Operand& operand, int64_t head) {
  const auto address = reinterpret_cast<uintptr_t>(operand.data) + head * element_size(operand.dtype);
  return operand.flat() && address % kAlignment == 0;
}

// The types of vectors, or any.
Types types_of(const TensorStep& t, MapKind map_kind) {
  const DType w = t.w.dtype;
  const Types any = w == DType::f64 ? Types::any_f64 : Types::any;
  const int64_t head = head_of(t);
  bool fits = map_kind != MapKind::nest && t.g.dtype == w;
  fits = fits && reaches_boundary(t.w, head) && reaches_boundary(t.g, head);
  DType state = t.state[0].data ? t.state[0].dtype : w;
  for (const Operand& o : t.state) fits = fits && (!o.data || (o.dtype == state && reaches_boundary(o, head)));
  if (!fits) return any;
  if (state == DType::f32 && w == DType::bf16) return Types::bf16_f32;
  if (state == DType::f32 && w == DType::f16) return Types::f16_f32;
  if (state != w) return any;
  return w == DType::f32 ? Types::f32 : w == DType::f64 ? Types::f64 : w == DType::bf16 ? Types::bf16 : Types::f16;
}

// A decay map's distinct values and how they spread over a parameter.
struct MapLayout {
  Nest source;  // of the values, in the map's memory: axes along which it changes
  Nest spread;  // element to number of its value: all axes up to the last one along which the map changes
};

MapLayout layout_of(const Nest& nest) {
  MapLayout layout{};
  int last = nest.count;
  while (last > 0 && nest.axes[last - 1].stride == 0) --last;
  int64_t values = 1;
  for (int a = 0; a < last; ++a) {
    const bool changes = nest.axes[a].stride != 0;
    layout.spread.axes[layout.spread.count++] = {nest.axes[a].size, changes ? values : 0};
    if (!changes) continue;
    layout.source.axes[layout.source.count++] = nest.axes[a];
    values *= nest.axes[a].size;
  }
  return layout;
}

int64_t length(const Nest& nest) {
  int64_t product = 1;
  for (int a = 0; a < nest.count; ++a) product *= nest.axes[a].size;
  return product;
}

bool same(const Nest& a, const Nest& b) {
  return a.count == b.count && std::equal(a.axes, a.axes + a.count, b.axes, [](const Axis& x, const Axis& y) {
           return x.size == y.size && x.stride == y.stride;
         });
}

class Builder {
 public:
  explicit Builder(GpuTable& table) : table_(table), s_(table.sections) { s_.clear(); }

  void add(const std::vector<TensorStep>& tensors) {
    s_.entries.reserve(tensors.size());
    for (const TensorStep& t : tensors) {
      s_.entries.push_back(entry_of(t));
      s_.grads.push_back(t.g.data);
    }
    add_chunks(tensors);
  }

  void write(const double* hyper, int64_t groups, int columns, const std::vector<DeviceScalar>& lrs) {
    table_.bytes.clear();
    table_.grads = append(s_.grads.data(), static_cast<int64_t>(s_.grads.size()));
    table_.hyper = append(hyper, groups * columns);
    table_.has_lrs = !lrs.empty();
    table_.lrs = append(lrs.data(), static_cast<int64_t>(lrs.size()));
    table_.entries = append(s_.entries.data(), static_cast<int64_t>(s_.entries.size()));
    table_.nests = append(s_.nests.data(), static_cast<int64_t>(s_.nests.size()));
    table_.maps = append(s_.maps.data(), static_cast<int64_t>(s_.maps.size()));
    table_.chunks = append(s_.chunks.data(), static_cast<int64_t>(s_.chunks.size()));
    table_.entry_count = static_cast<int64_t>(s_.entries.size());
  }

 private:
  Entry entry_of(const TensorStep& t) {
    Entry e;
    // Padding is compared with the last step's bytes, too.
    std::memset(&e, 0, sizeof e);
    e.w = t.w.data, e.w_dtype = t.w.dtype, e.nests[kNestW] = keep(t.w.nest);
    e.g_dtype = t.g.dtype, e.nests[kNestG] = keep(t.g.nest);
    for (int k = 0; k < kStates; ++k) {
      e.state[k] = t.state[k].data;
      e.nests[kNestState + k] = kFlat;
      if (t.state[k].data == nullptr) continue;
      e.state_dtype[k] = t.state[k].dtype;
      e.nests[kNestState + k] = keep(t.state[k].nest);
    }
    e.counter = t.counter;
    e.counter_is_double = t.counter_dtype == DType::f64 && t.counter != nullptr;
    e.numel = t.numel;
    e.nests[kNestLogical] = keep(t.logical_nest);
    e.group = static_cast<int32_t>(t.group);
    e.ordinal = t.ordinal;
    e.first = t.first;
    set_map(t, e);
    e.types = types_of(t, e.map_kind);
    e.head = e.types < Types::any ? static_cast<uint8_t>(head_of(t)) : 0;
    return e;
  }

  void set_map(const TensorStep& t, Entry& e) {
    e.nests[kNestMap] = kFlat;
    e.map_kind = MapKind::uniform;
    static const double one = 1;
    if (t.map == nullptr || t.numel == 0) {
      e.map = keep_map(&one, Nest{});
      return;
    }
    const MapLayout layout = layout_of(*t.map_nest);
    e.map = keep_map(t.map, layout.source);
    Nest cycle = layout.spread;
    int64_t run = 1;
    if (cycle.count > 0 && cycle.axes[0].stride == 0) {
      run = cycle.axes[0].size;
      std::copy(cycle.axes + 1, cycle.axes + cycle.count, cycle.axes);
      --cycle.count;
    }
    if (cycle.count == 0) return;
    const bool regular = std::all_of(cycle.axes, cycle.axes + cycle.count, [](const Axis& a) { return a.stride != 0; });
    const int64_t period = length(cycle), limit = std::numeric_limits<int32_t>::max() - 2 * kChunk;
    if (regular && run < limit && period < limit) {
      e.map_kind = MapKind::cyclic;
      e.run = static_cast<uint32_t>(run);
      e.period = static_cast<uint32_t>(period);
    } else {
      e.map_kind = MapKind::nest;
      e.nests[kNestMap] = keep(&layout.spread);
    }
  }

  int64_t keep_map(const double* map, const Nest& source) {
    for (const Sections::Map& known : s_.known_maps) {
      if (known.values == map && same(known.source, source)) return known.begin;
    }
    const auto begin = static_cast<int64_t>(s_.maps.size());
    for_runs(source, 0, length(source), [&](int64_t, int64_t offset, int64_t stride, int64_t run) {
      for (int64_t i = 0; i < run; ++i) s_.maps.push_back(map[offset + i * stride]);
    });
    s_.known_maps.push_back({map, source, begin});
    return begin;
  }

  int32_t keep(const Nest* nest) {
    if (nest == nullptr) return kFlat;
    Nest copy;
    std::memset(&copy, 0, sizeof copy);
    copy.count = nest->count;
    std::copy(nest->axes, nest->axes + nest->count, copy.axes);
    s_.nests.push_back(copy);
    return static_cast<int32_t>(s_.nests.size() - 1);
  }

  void add_chunks(const std::vector<TensorStep>& tensors) {
    table_.works.clear();
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].numel > 0) s_.order.emplace_back(s_.entries[i].types, static_cast<int32_t>(i));
    }
    std::stable_sort(s_.order.begin(), s_.order.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [types, entry] : s_.order) {
      const int64_t body = tensors[entry].numel - s_.entries[entry].head;
      const int64_t count = std::max<int64_t>(1, (body + kChunk - 1) / kChunk);
      if (table_.works.empty() || table_.works.back().types != types) {
        table_.works.push_back({types, static_cast<int64_t>(s_.chunks.size()), 0});
      }
      for (int64_t k = 0; k < count; ++k) s_.chunks.push_back({entry, static_cast<int32_t>(k)});
      table_.works.back().count += count;
    }
  }

  template <typename T>
  int64_t append(const T* values, int64_t count) {
    const auto begin = static_cast<int64_t>(table_.bytes.size());
    const int64_t size = count * static_cast<int64_t>(sizeof(T));
    table_.bytes.resize(begin + (size + kAlignment - 1) / kAlignment * kAlignment);
    if (size > 0) std::memcpy(table_.bytes.data() + begin, values, size);
    return begin;
  }

  GpuTable& table_;
  Sections& s_;
};

}  // namespace

void build(GpuTable& table, const std::vector<TensorStep>& tensors, const double* hyper, int64_t groups, int columns,
           const std::vector<DeviceScalar>& lrs) {
  Builder builder(table);
  builder.add(tensors);
  builder.write(hyper, groups, columns, lrs);
}

}  // namespace loco::optim_step
