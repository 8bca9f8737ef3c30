// One block steps one chunk of a tensor. Elements are numbered in the parameter's memory order. Where all operands are
// flat and reach a 16-byte boundary together, a thread takes 16 bytes of each at a time; elements before the first
// boundary, after the last whole vector and in all other tensors are taken one by one.
#include "common/launch.h"
#include "optim_step/cuda.h"
#include "optim_step/gpu_operand.h"

namespace loco::optim_step {
namespace {

constexpr int kThreads = 256;
// Blocks at a time on a multiprocessor, at least: accesses in flight hide their latency.
constexpr int kBlocks = 3;
constexpr int kBlocksOfMany = 2;   // of kernels that need many registers
constexpr uint32_t kTable = 2048;  // coefficients of a cyclic map that a block keeps in shared memory

template <class Rule>
struct Parameters {
  void* const* grads;
  const double* hyper;
  const DeviceScalar* lrs;  // null: none
  const Entry* entries;
  const Nest* nests;
  const double* maps;
  const Chunk* chunks;
  typename Rule::template Scalars<double>* scalars;  // one for each entry; null: made from hyper
  Options options;
  DeviceScalar grad_scale, found_inf;
  Rounding rounding;
};

LOCO_DEVICE double value_of(const DeviceScalar& scalar) {
  return scalar.is_double ? *static_cast<const double*>(scalar.data) : *static_cast<const float*>(scalar.data);
}

LOCO_DEVICE bool is_set(const DeviceScalar& scalar) { return scalar.data != nullptr && value_of(scalar) != 0; }

template <class Rule>
LOCO_DEVICE const double* row_of(const Parameters<Rule>& p, const Entry& entry) {
  return p.hyper + entry.group * Rule::columns;
}

template <class Rule>
LOCO_DEVICE double lr_of(const Parameters<Rule>& p, const Entry& entry) {
  const bool own = p.lrs == nullptr || p.lrs[entry.group].data == nullptr;
  return own ? row_of(p, entry)[0] : value_of(p.lrs[entry.group]);
}

// One thread for each entry: counts the step and works out its scalars.
template <class Rule>
__global__ void __launch_bounds__(kThreads) prepare(const __grid_constant__ Parameters<Rule> p, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count || is_set(p.found_inf)) return;
  const Entry& entry = p.entries[i];
  double step;
  if (entry.counter_is_double) {
    step = *static_cast<double*>(entry.counter) += 1;
  } else {
    step = 1 + static_cast<double>(*static_cast<float*>(entry.counter));
    *static_cast<float*>(entry.counter) = static_cast<float>(step);
  }
  p.scalars[i] = Rule::scalars(row_of(p, entry), lr_of(p, entry), step);
}

template <typename T>
LOCO_DEVICE void update(T& w, T g, T (&state)[kStates], T c, SgdFlags flags, const SgdScalars<T>& scalars) {
  sgd(w, g, state[0], c, flags, scalars);
}

template <typename T>
LOCO_DEVICE void update(T& w, T g, T (&state)[kStates], T c, AdamFlags flags, const AdamScalars<T>& scalars) {
  adam(w, g, state[0], state[1], state[2], c, flags, scalars);
}

// What the elements of a chunk have in common.
template <class Rule, typename T>
struct Task {
  const Parameters<Rule>& p;
  const Entry& entry;
  int64_t begin;  // of the chunk
  void* g;
  Coefficients coefficients;
  typename Rule::Flags flags;
  typename Rule::template Scalars<T> scalars;

  LOCO_DEVICE Task(const Parameters<Rule>& p, const Chunk& chunk) : p(p), entry(p.entries[chunk.entry]) {
    begin = chunk.index == 0 ? 0 : entry.head + chunk.index * kChunk;
    g = p.grads[chunk.entry];
    const double* row = row_of(p, entry);
    const double lr = lr_of(p, entry);
    coefficients = Rule::coefficients(p.options, row, lr);
    flags = Rule::flags(p.options, coefficients.decay, entry.state[0] != nullptr, entry.first);
    scalars = Rule::template as<T>(p.scalars ? p.scalars[chunk.entry] : Rule::scalars(row, lr, 0));
  }

  LOCO_DEVICE uint32_t count(const Chunk& chunk) const {
    const int64_t end = entry.head + (chunk.index + 1) * kChunk;
    return static_cast<uint32_t>((end < entry.numel ? end : entry.numel) - begin);
  }

  LOCO_DEVICE T coefficient(int64_t value) const { return static_cast<T>(coefficients.at(p.maps[entry.map + value])); }

  LOCO_DEVICE PhiloxKey key() const {
    const Rounding& r = p.rounding;
    return {static_cast<uint32_t>(r.seed), static_cast<uint32_t>(r.seed >> 32), entry.ordinal, r.step};
  }

  LOCO_DEVICE bool narrow() const { return entry.numel <= UINT32_MAX; }

  // The gradient as the rule wants it; written back if it is scaled.
  LOCO_DEVICE T descent(T gradient) const { return p.options.maximize ? -gradient : gradient; }
  LOCO_DEVICE T grad_scale() const { return static_cast<T>(value_of(p.grad_scale)); }
};

// Updates one element, whatever its operands' types and strides.
template <class Rule, typename T>
LOCO_DEVICE void step_one(const Task<Rule, T>& task, uint32_t offset) {
  const Entry& e = task.entry;
  const Nest* nests = task.p.nests;
  const int64_t i = task.begin + offset;
  const bool narrow = task.narrow();
  const int64_t at_w = offset_in(nests, e.nests[kNestW], i, narrow),
                at_g = offset_in(nests, e.nests[kNestG], i, narrow);
  T w = load_any<T>(e.w_dtype, e.w, at_w), g = load_any<T>(e.g_dtype, task.g, at_g);
  T state[kStates];
  int64_t at[kStates];
#pragma unroll
  for (int k = 0; k < kStates; ++k) {
    if (e.state[k] == nullptr) continue;
    at[k] = offset_in(nests, e.nests[kNestState + k], i, narrow);
    state[k] = load_any<T>(e.state_dtype[k], e.state[k], at[k]);
  }
  if (task.p.grad_scale.data) {
    g = g / task.grad_scale();
    store_any(e.g_dtype, task.g, at_g, g);
  }
  int64_t value = 0;
  if (e.map_kind == MapKind::cyclic) value = i / e.run % e.period;
  if (e.map_kind == MapKind::nest) value = offset_in(nests, e.nests[kNestMap], i, narrow);
  update(w, task.descent(g), state, task.coefficient(value), task.flags, task.scalars);
  const bool stochastic = task.p.rounding.stochastic && e.w_dtype == DType::bf16;
  uint32_t words[1 + kStates];
  if (stochastic) philox(task.key(), static_cast<uint64_t>(offset_in(nests, e.nests[kNestLogical], i, narrow)), words);
  store_any(e.w_dtype, e.w, at_w, w, stochastic, words[0]);
#pragma unroll
  for (int k = 0; k < kStates; ++k) {
    if (e.state[k]) store_any(e.state_dtype[k], e.state[k], at[k], state[k], stochastic, words[1 + k]);
  }
}

template <class Rule, typename T>
__global__ void __launch_bounds__(kThreads, kBlocksOfMany)
    step_elements(const __grid_constant__ Parameters<Rule> p, int64_t first_chunk) {
  if (is_set(p.found_inf)) return;
  const Chunk chunk = p.chunks[first_chunk + blockIdx.x];
  const Task<Rule, T> task(p, chunk);
  const uint32_t count = task.count(chunk);
  for (uint32_t k = threadIdx.x; k < count; k += kThreads) step_one(task, k);
}

// The decay coefficients of a chunk whose map repeats, if it has one.
template <typename T>
struct Cycle {
  const T* table;        // in shared memory; null: too long for it
  uint32_t run, period;  // 0: uniform
  uint32_t rest, phase;  // the chunk's beginning / run leaves rest, its quotient modulo period is phase
  T uniform;

  template <class Rule>
  LOCO_DEVICE Cycle(const Task<Rule, T>& task, const T* table) : uniform(task.coefficient(0)) {
    const Entry& e = task.entry;
    run = e.run;
    period = e.map_kind == MapKind::cyclic && task.flags.decay != Decay::none ? e.period : 0;
    this->table = period <= kTable ? table : nullptr;
    rest = period ? static_cast<uint32_t>(task.begin % run) : 0;
    phase = period ? static_cast<uint32_t>(task.begin / run % period) : 0;
  }

  template <int N, class Rule>
  LOCO_DEVICE void read(const Task<Rule, T>& task, uint32_t offset, T (&c)[N]) const {
    if (period == 0) {
#pragma unroll
      for (int k = 0; k < N; ++k) c[k] = uniform;
      return;
    }
    const uint32_t at = rest + offset;
    uint32_t within = run == 1 ? 0 : at % run;
    uint32_t place = (phase + (run == 1 ? at : at / run)) % period;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      c[k] = table ? table[place] : task.coefficient(place);
      if (++within < run) continue;
      within = 0;
      place = place + 1 == period ? 0 : place + 1;
    }
  }
};

// Updates as many elements as fill 16 bytes of the parameter, at a 16-byte boundary of every operand.
template <class Rule, class Types, bool stochastic, typename T>
LOCO_DEVICE void step_vector(const Task<Rule, T>& task, const Cycle<T>& cycle, uint32_t offset) {
  constexpr int N = Types::width;
  const Entry& e = task.entry;
  const int64_t i = task.begin + offset;
  T w[N], g[N], state[kStates][N], c[N];
  load_vector<Types::w, N>(e.w, i, w);
  load_vector<Types::w, N>(task.g, i, g);
#pragma unroll
  for (int k = 0; k < kStates; ++k) {
    if (e.state[k]) load_vector<Types::state, N>(e.state[k], i, state[k]);
  }
  cycle.read(task, offset, c);
  if (task.p.grad_scale.data) {
#pragma unroll
    for (int k = 0; k < N; ++k) g[k] = g[k] / task.grad_scale();
    store_vector<Types::w, N>(task.g, i, g);
  }
  uint32_t words[1 + kStates][N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    T of_element[kStates] = {state[0][k], state[1][k], state[2][k]};
    update(w[k], task.descent(g[k]), of_element, c[k], task.flags, task.scalars);
#pragma unroll
    for (int j = 0; j < kStates; ++j) state[j][k] = of_element[j];
    if constexpr (stochastic) {
      uint32_t four[4];
      philox(task.key(), static_cast<uint64_t>(offset_in(task.p.nests, e.nests[kNestLogical], i + k, task.narrow())),
             four);
#pragma unroll
      for (int j = 0; j <= kStates; ++j) words[j][k] = four[j];
    }
  }
  store_vector<Types::w, N>(e.w, i, w, stochastic ? words[0] : nullptr);
#pragma unroll
  for (int k = 0; k < kStates; ++k) {
    if (e.state[k]) store_vector<Types::state, N>(e.state[k], i, state[k], stochastic ? words[1 + k] : nullptr);
  }
}

// DTypes of parameters and gradients, and of states.
template <DType w_, DType state_>
struct VectorTypes {
  static constexpr DType w = w_, state = state_;
  static constexpr int width = w == DType::f64 ? 2 : w == DType::f32 ? 4 : 8;
  using T = std::conditional_t<w == DType::f64, double, float>;
};

template <class Rule, class Types, bool stochastic>
__global__ void __launch_bounds__(kThreads, stochastic || sizeof(typename Types::T) == 8 ? kBlocksOfMany : kBlocks)
    step_vectors(const __grid_constant__ Parameters<Rule> p, int64_t first_chunk) {
  using T = typename Types::T;
  constexpr uint32_t width = Types::width;
  __shared__ T table[kTable];
  if (is_set(p.found_inf)) return;
  const Chunk chunk = p.chunks[first_chunk + blockIdx.x];
  const Task<Rule, T> task(p, chunk);
  const Cycle<T> cycle(task, table);
  if (cycle.period != 0 && cycle.table != nullptr) {
    for (uint32_t k = threadIdx.x; k < cycle.period; k += kThreads) table[k] = task.coefficient(k);
    __syncthreads();
  }
  const uint32_t count = task.count(chunk), head = chunk.index == 0 ? task.entry.head : 0;
  const uint32_t vectors = (count - head) / width, tail = head + vectors * width;
  for (uint32_t k = threadIdx.x; k < vectors; k += kThreads) {
    step_vector<Rule, Types, stochastic>(task, cycle, head + k * width);
  }
  // Fewer than 8 elements before the vectors, and after them.
  const uint32_t end = threadIdx.x < head ? threadIdx.x : tail + threadIdx.x - head;
  if (end < head || (end >= tail && end < count)) step_one(task, end);
}

template <class Rule>
Parameters<Rule> parameters_of(const CudaCall& call) {
  const GpuTable& t = *call.table;
  const auto at = [&](int64_t offset) { return call.memory + offset; };
  Parameters<Rule> p;
  p.grads = reinterpret_cast<void* const*>(at(t.grads));
  p.hyper = reinterpret_cast<const double*>(at(t.hyper));
  p.lrs = t.has_lrs ? reinterpret_cast<const DeviceScalar*>(at(t.lrs)) : nullptr;
  p.entries = reinterpret_cast<const Entry*>(at(t.entries));
  p.nests = reinterpret_cast<const Nest*>(at(t.nests));
  p.maps = reinterpret_cast<const double*>(at(t.maps));
  p.chunks = reinterpret_cast<const Chunk*>(at(t.chunks));
  const auto scratch = reinterpret_cast<typename Rule::template Scalars<double>*>(at(t.bytes.size()));
  p.scalars = scratch_bytes<Rule>(t) > 0 ? scratch : nullptr;
  p.options = call.options;
  p.grad_scale = call.grad_scale;
  p.found_inf = call.found_inf;
  p.rounding = call.rounding;
  return p;
}

template <class Rule, DType w, DType state>
void launch_vectors(const Parameters<Rule>& p, const Work& work, void* stream) {
  using Vector = VectorTypes<w, state>;
  const auto blocks = static_cast<unsigned>(work.count);
  if constexpr (w == DType::bf16) {
    if (p.rounding.stochastic) {
      LOCO_LAUNCH((step_vectors<Rule, Vector, true>), blocks, kThreads, stream, p, work.first);
      return;
    }
  }
  LOCO_LAUNCH((step_vectors<Rule, Vector, false>), blocks, kThreads, stream, p, work.first);
}

template <class Rule, typename T>
void launch_elements(const Parameters<Rule>& p, const Work& work, void* stream) {
  LOCO_LAUNCH((step_elements<Rule, T>), static_cast<unsigned>(work.count), kThreads, stream, p, work.first);
}

template <class Rule>
void launch(const Parameters<Rule>& p, const Work& work, void* stream) {
  switch (work.types) {
    case Types::f32:
      return launch_vectors<Rule, DType::f32, DType::f32>(p, work, stream);
    case Types::f64:
      return launch_vectors<Rule, DType::f64, DType::f64>(p, work, stream);
    case Types::bf16:
      return launch_vectors<Rule, DType::bf16, DType::bf16>(p, work, stream);
    case Types::f16:
      return launch_vectors<Rule, DType::f16, DType::f16>(p, work, stream);
    case Types::bf16_f32:
      return launch_vectors<Rule, DType::bf16, DType::f32>(p, work, stream);
    case Types::f16_f32:
      return launch_vectors<Rule, DType::f16, DType::f32>(p, work, stream);
    case Types::any:
      return launch_elements<Rule, float>(p, work, stream);
    case Types::any_f64:
      return launch_elements<Rule, double>(p, work, stream);
  }
}

}  // namespace

template <>
int64_t scratch_bytes<Sgd>(const GpuTable&) {
  return 0;
}

template <>
int64_t scratch_bytes<Adam>(const GpuTable& table) {
  return table.entry_count * static_cast<int64_t>(sizeof(AdamScalars<double>));
}

template <class Rule>
void step_cuda(const CudaCall& call) {
  const Parameters<Rule> p = parameters_of<Rule>(call);
  const int64_t count = call.table->entry_count;
  if (p.scalars != nullptr) {
    const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
    LOCO_LAUNCH(prepare<Rule>, blocks, kThreads, call.stream, p, count);
  }
  for (const Work& work : call.table->works) launch(p, work, call.stream);
}

template void step_cuda<Sgd>(const CudaCall& call);
template void step_cuda<Adam>(const CudaCall& call);

}  // namespace loco::optim_step
