// Builds the table that the GPU kernels of a step read.
#include "optim_step/gpu_table.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>

#include "common/mistake.h"
#include "optim_step/decay_table.h"

namespace loco::optim_step {
namespace {

using ring_prox::kAlignment;  // alignment of sections and of vectors

constexpr int64_t kResident = 456;  // least number of blocks that the largest GPUs hold at a time: 3 on 152 processors

// Returns the number of elements before the first one at a 16-byte boundary.
int64_t head_of(const TensorStep& t) {
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.w.data) % kAlignment);
  return std::min((kAlignment - past) % kAlignment / element_size(t.w.dtype), t.numel);
}

// Returns whether the operand is flat and its element number `head` is at a 16-byte boundary.
bool reaches_boundary(const Operand& operand, int64_t head) {
  const auto address = reinterpret_cast<uintptr_t>(operand.data) + head * element_size(operand.dtype);
  return operand.flat() && address % kAlignment == 0;
}

// Returns the types for kernels that process 16 bytes at a time, or any or any_f64 if none of them supports the tensor.
Types types_of(const TensorStep& t, MapKind map_kind) {
  const DType w = t.w.dtype;
  const Types any = w == DType::f64 ? Types::any_f64 : Types::any;
  const int64_t head = head_of(t);
  bool fits = map_kind != MapKind::nest && t.g.dtype == w;
  fits = fits && reaches_boundary(t.w, head) && t.g.flat();
  DType state = t.state[0].data ? t.state[0].dtype : w;
  for (const Operand& o : t.state) fits = fits && (!o.data || (o.dtype == state && reaches_boundary(o, head)));
  if (!fits) return any;
  if (state == DType::f32 && w == DType::bf16) return Types::bf16_f32;
  if (state == DType::f32 && w == DType::f16) return Types::f16_f32;
  if (state != w) return any;
  return w == DType::f32 ? Types::f32 : w == DType::f64 ? Types::f64 : w == DType::bf16 ? Types::bf16 : Types::f16;
}

uint32_t cuda_kind(const TensorStep& t, Entry& e) {
  e.types = types_of(t, e.map_kind);
  e.head = e.types < Types::any ? static_cast<uint8_t>(head_of(t)) : 0;
  e.g_aligned = reaches_boundary(t.g, e.head);
  return static_cast<uint32_t>(e.types);
}

// A decay map's distinct values, and which of them each element of the parameter has.
struct MapLayout {
  Nest source;  // offsets of the values in the map's memory: the axes along which it changes
  Nest spread;  // maps an element to the number of its value: all axes up to the last along which the map changes
};

MapLayout layout_of(const Nest& nest) {
  MapLayout layout{{}, repeating_part(nest)};
  int64_t values = 1;
  for (int a = 0; a < layout.spread.count; ++a) {
    if (nest.axes[a].stride == 0) continue;
    layout.source.axes[layout.source.count++] = nest.axes[a];
    layout.spread.axes[a].stride = values;
    values *= nest.axes[a].size;
  }
  return layout;
}

// Returns the work of a single tensor, which may be merged with that of others.
ProxWork prox_work_of(const TensorStep& t, bool has_metric) {
  const ring_prox::Shape shape = t.shape();
  const bool is_double = t.w.dtype == DType::f64;
  const int64_t bytes = bytes_of_filter(shape.numel(), is_double, has_metric);
  const int64_t of_solver = ring_prox::solver_bytes(shape.rings, is_double, has_metric);
  const bool on_chip = bytes + of_solver <= ring_prox::kMostStaged;
  return {is_double, on_chip,   ring_prox::threads_for(shape),       0,
          1,         t.filters, on_chip ? bytes + of_solver : bytes, of_solver};
}

// Collects the table's sections, then writes them one after another. Maps and proxes that several tensors share
// are stored once.
class Builder {
 public:
  Builder(GpuTable& table, const Division& division) : table_(table), division_(division) {}

  void add(const std::vector<TensorStep>& tensors, bool has_metric) {
    entries_.reserve(tensors.size());
    for (const TensorStep& t : tensors) {
      entries_.push_back(entry_of(t));
      Entry& entry = entries_.back();
      const uint32_t kind = division_.kind_of(t, entry);
      if (t.numel > 0 && entry.prox < 0) order_.emplace_back(kind, static_cast<int32_t>(grads_.size()));
      grads_.push_back(t.g.data);
    }
    add_chunks();
    add_prox_chunks(tensors, has_metric);
  }

  void write(const Hyper& hyper) {
    const auto append = [&](const auto& values) {
      return ring_prox::append(table_.bytes, values.data(), static_cast<int64_t>(values.size()));
    };
    table_.grads = append(grads_);
    table_.hyper = ring_prox::append(table_.bytes, hyper.rows, hyper.groups * hyper.columns);
    table_.has_lrs = !hyper.lrs.empty();
    table_.lrs = append(hyper.lrs);
    table_.entries = append(entries_);
    table_.nests = append(nests_);
    table_.maps = append(maps_);
    table_.chunks = append(chunks_);
    table_.proxes = append(proxes_);
    table_.taps = append(taps_);
    table_.begins = append(begins_);
    table_.thresholds = append(thresholds_);
    table_.entry_count = static_cast<int64_t>(entries_.size());
  }

 private:
  // A decay map whose distinct values begin at index `begin` of maps_.
  struct KnownMap {
    const double* values;
    Nest source;
    int64_t begin;
  };

  // Identifies a prox. Parameters share it if they have the same penalty and number of channels in the same order.
  struct KnownProx {
    const ring_prox::Penalty* penalty;
    int64_t channels;
    bool channels_fastest;
  };

  Entry entry_of(const TensorStep& t) {
    Entry e;
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
    e.prox = t.penalty != nullptr && t.numel > 0 ? keep_prox(t) : -1;
    set_map(t, e);
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
    const int64_t period = cycle.length(), limit = std::numeric_limits<int32_t>::max() - 2 * kChunk;
    const bool one_change = run >= kMostWidth;  // a vector has at most one change
    if (regular && run < limit && period < limit &&
        (one_change || caches(period, e.prox < 0 ? kCached : kCachedWithProx))) {
      e.map_kind = MapKind::cyclic;
      e.run = static_cast<uint32_t>(run);
      e.period = static_cast<uint32_t>(period);
    } else {
      Nest spread = layout.spread;
      if (spread.count < t.map_nest->count) spread.axes[spread.count++] = {1, 0};  // the last axis takes what remains
      e.map_kind = MapKind::nest;
      e.nests[kNestMap] = keep(&spread);
    }
  }

  int64_t keep_map(const double* map, const Nest& source) {
    for (const KnownMap& known : known_maps_) {
      if (known.values == map && known.source == source) return known.begin;
    }
    const auto begin = static_cast<int64_t>(maps_.size());
    for_runs(source, 0, source.length(), [&](int64_t, int64_t offset, int64_t stride, int64_t run) {
      for (int64_t i = 0; i < run; ++i) maps_.push_back(map[offset + i * stride]);
    });
    known_maps_.push_back({map, source, begin});
    return begin;
  }

  int32_t keep_prox(const TensorStep& t) {
    const ring_prox::Penalty& penalty = *t.penalty;
    const ring_prox::Shape shape = t.shape();
    for (size_t i = 0; i < proxes_.size(); ++i) {
      const KnownProx& known = known_proxes_[i];
      if (known.penalty == &penalty && known.channels == shape.channels &&
          known.channels_fastest == shape.channels_fastest) {
        return static_cast<int32_t>(i);
      }
    }
    Prox prox;
    std::memset(&prox, 0, sizeof prox);
    const ring_prox::RingOrder order = ring_prox::ring_order(shape);
    prox.taps = extend(taps_, order.taps);
    prox.begins = extend(begins_, order.begins);
    prox.plain = extend(thresholds_, penalty.plain);
    prox.squared = penalty.squared.empty() ? -1 : extend(thresholds_, penalty.squared);
    prox.channels = static_cast<uint32_t>(shape.channels);
    prox.tap_count = static_cast<uint32_t>(shape.taps);
    prox.rings = shape.rings;
    prox.channels_fastest = shape.channels_fastest;
    proxes_.push_back(prox);
    known_proxes_.push_back({&penalty, shape.channels, shape.channels_fastest});
    return static_cast<int32_t>(proxes_.size() - 1);
  }

  // Appends `more` to `values` and returns its index there.
  template <typename T>
  static int64_t extend(std::vector<T>& values, const std::vector<T>& more) {
    const auto begin = static_cast<int64_t>(values.size());
    values.insert(values.end(), more.begin(), more.end());
    return begin;
  }

  int32_t keep(const Nest* nest) {
    if (nest == nullptr) return kFlat;
    Nest copy;
    std::memset(&copy, 0, sizeof copy);
    copy.count = nest->count;
    std::copy(nest->axes, nest->axes + nest->count, copy.axes);
    nests_.push_back(copy);
    return static_cast<int32_t>(nests_.size() - 1);
  }

  // Divides entries without a prox into chunks, sorted by kind, and makes one Work per kind.
  //
  // Blocks begin in the order of chunks, and towards the end of a launch fewer and fewer multiprocessors are busy.
  // Therefore the largest tensors come first, and a chunk has at most as many elements as each block of a GPU would get
  // of those that are left (guided self-scheduling, Polychronopoulos and Kuck 1987). A launch that has less than a
  // whole chunk for each of them keeps whole chunks: it is short, and many small chunks would make its table long.
  void add_chunks() {
    const auto parts_of = [&](int32_t entry) {
      const int64_t body = entries_[entry].numel - entries_[entry].head;
      return std::max<int64_t>(1, (body + division_.part - 1) / division_.part);
    };
    const auto sort_of = [&](const auto& item) { return std::make_pair(item.first, -entries_[item.second].numel); };
    std::stable_sort(order_.begin(), order_.end(),
                     [&](const auto& a, const auto& b) { return sort_of(a) < sort_of(b); });
    int64_t left = 0;  // parts of the same kind that are in no chunk yet
    bool is_long = false;
    for (auto next = order_.begin(); next != order_.end(); ++next) {
      const auto [kind, entry] = *next;
      if (table_.works.empty() || table_.works.back().kind != kind) {
        table_.works.push_back({kind, static_cast<int64_t>(chunks_.size()), 0});
        for (auto it = next; it != order_.end() && it->first == kind; ++it) left += parts_of(it->second);
        is_long = left >= kResident * division_.most_parts;
      }
      const int64_t parts = parts_of(entry);
      for (int64_t begin = 0, count; begin < parts; begin += count, left -= count) {
        const int64_t share = is_long ? (left + kResident - 1) / kResident : division_.most_parts;
        count = std::min({share, division_.most_parts, parts - begin});
        chunks_.push_back({entry, static_cast<int32_t>(begin), static_cast<int32_t>(count)});
        ++table_.works.back().count;
      }
    }
  }

  // Makes one chunk per entry with a prox, and groups into one ProxWork the entries whose filters can share launches.
  void add_prox_chunks(const std::vector<TensorStep>& tensors, bool has_metric) {
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    std::vector<std::pair<ProxWork, int32_t>> order;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (entries_[i].prox < 0) continue;
      order.emplace_back(prox_work_of(tensors[i], has_metric), static_cast<int32_t>(i));
    }
    const auto sort_of = [](const ProxWork& w) { return std::make_tuple(w.is_double, w.on_chip, w.threads); };
    std::stable_sort(order.begin(), order.end(),
                     [&](const auto& a, const auto& b) { return sort_of(a.first) < sort_of(b.first); });
    for (const auto& [of_entry, entry] : order) {
      auto& works = table_.prox_works;
      if (works.empty() || sort_of(works.back()) != sort_of(of_entry) ||
          works.back().filters + of_entry.filters > most) {
        works.push_back(of_entry);
        works.back().first = static_cast<int64_t>(chunks_.size());
        works.back().count = works.back().filters = 0;
      }
      ProxWork& work = works.back();
      chunks_.push_back({entry, static_cast<int32_t>(work.filters), 1});
      ++work.count;
      work.filters += of_entry.filters;
      work.bytes = LOCO_MISTAKE(step_prox_memory) ? of_entry.bytes : std::max(work.bytes, of_entry.bytes);
      work.solver_bytes = std::max(work.solver_bytes, of_entry.solver_bytes);
    }
  }

  GpuTable& table_;
  const Division& division_;
  std::vector<void*> grads_;
  std::vector<Entry> entries_;
  std::vector<Nest> nests_;
  std::vector<double> maps_;
  std::vector<KnownMap> known_maps_;
  std::vector<Chunk> chunks_;
  std::vector<std::pair<uint32_t, int32_t>> order_;  // entries with elements and without a prox, by kind
  std::vector<Prox> proxes_;
  std::vector<KnownProx> known_proxes_;  // parallel to proxes_
  std::vector<ring_prox::Tap> taps_;
  std::vector<uint32_t> begins_;
  std::vector<double> thresholds_;
};

}  // namespace

const Division kCudaDivision{kPart, kChunk / kPart, cuda_kind};

void build(GpuTable& table, const Division& division, const std::vector<TensorStep>& tensors, const Hyper& hyper,
           bool has_metric) {
  Builder builder(table, division);
  builder.add(tensors, has_metric);
  builder.write(hyper);
}

bool refresh(GpuTable& table, const std::vector<TensorStep>& tensors, const Hyper& hyper) {
  if (table.bytes.empty()) return false;
  unsigned char* const bytes = table.bytes.data();
  auto* const grads = reinterpret_cast<void**>(bytes + table.grads);
  for (size_t i = 0; i < tensors.size(); ++i) grads[i] = tensors[i].g.data;
  std::copy_n(hyper.rows, hyper.groups * hyper.columns, reinterpret_cast<double*>(bytes + table.hyper));
  std::copy(hyper.lrs.begin(), hyper.lrs.end(), reinterpret_cast<DeviceScalar*>(bytes + table.lrs));
  return true;
}

}  // namespace loco::optim_step
