// Shared by the CUDA kernels of a step: their parameters, the state common to the elements of an entry, and the update
// of one element or of 16 bytes.
#pragma once

#include <cstdint>

#include "common/gpu_memory.h"
#include "common/mistake.h"
#include "optim_step/cuda.h"
#include "optim_step/gpu_operand.h"
#include "optim_step/gpu_quotient.h"

namespace loco::optim_step {

// Kernel parameters of all launches of a step. All arrays are contiguous and in global memory.
template <class Rule>
struct Parameters {
  void* const* grads;                                // [entries], each [numel]; element i is where nests[kNestG] says
  const double* hyper;                               // [groups, columns]
  const DeviceScalar* lrs;                           // [groups], data null: use hyper; null: use hyper for all
  const Entry* entries;                              // [entries]
  const Nest* nests;                                 // indexed by Entry::nests
  const double* maps;                                // distinct values of the decay maps, from Entry::map on
  const Chunk* chunks;                               // [chunks]
  typename Rule::template Scalars<double>* scalars;  // [entries]; null: computed from hyper
  Options options;
  DeviceScalar grad_scale, found_inf;
  Rounding rounding;
};

LOCO_DEVICE double value_of(const DeviceScalar& scalar) {
  return scalar.is_double ? *in_global(static_cast<const double*>(scalar.data))
                          : *in_global(static_cast<const float*>(scalar.data));
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

// Updates one weight and its states after the decay. Returns the weight's metric for a prox that follows, or 1 if the
// rule has none.
template <typename T>
LOCO_DEVICE T move(T& w, T d, T (&state)[kStates], SgdFlags flags, const SgdScalars<T>& scalars) {
  move_sgd(w, d, state[0], flags, scalars);
  return 1;
}

template <typename T>
LOCO_DEVICE T move(T& w, T d, T (&state)[kStates], AdamFlags flags, const AdamScalars<T>& scalars) {
  return move_adam(w, d, state[0], state[1], state[2], flags, scalars);
}

// State shared by the elements of an entry from `begin` on, which a block steps.
template <class Rule, typename T>
struct Task {
  const Parameters<Rule>& p;
  const Entry& entry;
  int64_t begin;
  void* g;
  Coefficients coefficients;
  typename Rule::Flags flags;
  typename Rule::template Scalars<T> scalars;

  LOCO_DEVICE Task(const Parameters<Rule>& p, int32_t number, int64_t begin)
      : p(p), entry(p.entries[number]), begin(begin) {
    g = p.grads[number];
    const double* row = row_of(p, entry);
    const double lr = lr_of(p, entry);
    coefficients = Rule::coefficients(p.options, row, lr);
    flags = Rule::flags(p.options, coefficients.decay, entry.state[0] != nullptr, entry.first);
    scalars = Rule::template as<T>(p.scalars ? p.scalars[number] : Rule::scalars(row, lr, 0));
  }

  // Returns the decay coefficient for the entry's map value number `value`.
  LOCO_DEVICE T coefficient(int64_t value) const { return static_cast<T>(coefficients.at(p.maps[entry.map + value])); }

  LOCO_DEVICE double prox_step() const {
    return Rule::prox_step(row_of(p, entry), lr_of(p, entry),
                           (entry.state[0] != nullptr) != LOCO_MISTAKE(step_prox_step));
  }

  // Returns whether parameters and states of bfloat16 are rounded stochastically.
  LOCO_DEVICE bool stochastic() const { return p.rounding.stochastic && entry.w_dtype == DType::bf16; }

  // Draws random words for element i: one for the parameter, then one per state.
  LOCO_DEVICE void draw(int64_t i, uint32_t (&words)[1 + kStates]) const {
    const int64_t element = offset_in(p.nests, entry.nests[kNestLogical], i, narrow());
    philox(p.rounding.key(entry.ordinal), static_cast<uint64_t>(element), words);
  }

  // Returns whether 32-bit indices suffice for the entry's elements.
  LOCO_DEVICE bool narrow() const { return entry.numel <= UINT32_MAX; }

  LOCO_DEVICE bool g_aligned() const { return entry.g_aligned || LOCO_MISTAKE(step_unaligned); }

  LOCO_DEVICE T descent(T gradient) const { return p.options.maximize ? -gradient : gradient; }
  LOCO_DEVICE T grad_scale() const { return static_cast<T>(value_of(p.grad_scale)); }
};

// GCC does not see that at[k] is used only for states that are present.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

// Updates one element of operands of any dtypes and strides. A gradient that is divided by grad_scale is written back.
// keep(w, metric, offset of w, random word) stores the parameter.
template <class Rule, typename T, class Keep>
LOCO_DEVICE void step_one(const Task<Rule, T>& task, uint32_t offset, const Keep& keep) {
  const Entry& e = task.entry;
  const Nest* nests = task.p.nests;
  const int64_t i = task.begin + offset;
  const bool narrow = task.narrow();
  const int64_t at_w = offset_in(nests, e.nests[kNestW], i, narrow),
                at_g = offset_in(nests, e.nests[kNestG], i, narrow);
  T w = load_any<T>(e.w_dtype, e.w, at_w), g = load_any<T>(e.g_dtype, task.g, at_g);
  T state[kStates] = {};
  int64_t at[kStates];
#pragma unroll
  for (int k = 0; k < Rule::states; ++k) {
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
  g = task.descent(g);
  apply_decay(task.flags.decay, w, g, task.coefficient(value));
  const T metric = move(w, g, state, task.flags, task.scalars);
  const bool stochastic = task.stochastic();
  uint32_t words[1 + kStates] = {};
  if (stochastic) task.draw(i, words);
  keep(w, metric, at_w, words[0]);
#pragma unroll
  for (int k = 0; k < Rule::states; ++k) {
    if (e.state[k]) store_any(e.state_dtype[k], e.state[k], at[k], state[k], stochastic, words[1 + k]);
  }
}

#pragma GCC diagnostic pop

// Decay coefficients of a task whose map is cyclic or uniform.
template <typename T>
struct Cycle {
  const T* table;        // [period + kMostWidth] in shared memory; null: the period is too long for it
  uint32_t run, period;  // 0: uniform
  uint32_t rest, phase;  // rest = begin % run and phase = begin / run % period, for the task's begin
  T uniform;

  // Fills the table, then synchronizes the block; all threads must call this. table: [size] in shared memory.
  template <class Rule>
  LOCO_DEVICE Cycle(const Task<Rule, T>& task, T* table, uint32_t size) : uniform(task.coefficient(0)) {
    const Entry& e = task.entry;
    run = e.run;
    period = e.map_kind == MapKind::cyclic && task.flags.decay != Decay::none ? e.period : 0;
    this->table = caches(period, size) ? table : nullptr;
    rest = period ? static_cast<uint32_t>(task.begin % run) : 0;
    phase = period ? static_cast<uint32_t>(task.begin / run % period) : 0;
    if (period == 0 || this->table == nullptr) return;
    for (uint32_t k = threadIdx.x; k < period + kMostWidth; k += blockDim.x) table[k] = task.coefficient(k % period);
    if (!LOCO_MISTAKE(step_barrier)) __syncthreads();
  }

  struct Position {
    uint32_t within, value;  // its number in its run, and the number of its value
  };

  LOCO_DEVICE Position at(uint32_t offset) const {
    if (period == 0) return {0, 0};
    const uint32_t i = rest + offset, first = LOCO_MISTAKE(step_phase) ? 0 : phase;
    return {i % run, (first + i / run) % period};
  }

  // Returns how far `elements` elements are apart in the cycle.
  LOCO_DEVICE Position distance(uint32_t elements) const {
    return period == 0 ? Position{0, 0} : Position{elements % run, elements / run % period};
  }

  // Advances a place without dividing.
  LOCO_DEVICE void advance(Position& position, const Position& distance) const {
    if (period == 0) return;
    position.within += distance.within;
    position.value += distance.value;
    if (position.within >= run) position.within -= run, ++position.value;
    if (position.value >= period) position.value -= period;
  }

  // Reads the coefficients of N elements from a place on.
  template <int N, class Rule>
  LOCO_DEVICE void read(const Task<Rule, T>& task, Position position, T (&c)[N]) const {
    static_assert(N <= kMostWidth);
    if (period == 0) {
#pragma unroll
      for (int k = 0; k < N; ++k) c[k] = uniform;
    } else if (run >= kMostWidth) {  // at most one change
      const T first = at_value(task, position.value), second = at_value(task, after(position.value));
#pragma unroll
      for (int k = 0; k < N; ++k) c[k] = position.within + k < run ? first : second;
    } else if (run == 1) {
#pragma unroll
      for (int k = 0; k < N; ++k) c[k] = table[position.value + k];
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        c[k] = table[position.value];
        if (++position.within < run) continue;
        position = {0, after(position.value)};
      }
    }
  }

 private:
  LOCO_DEVICE uint32_t after(uint32_t value) const { return value + 1 == period ? 0 : value + 1; }

  template <class Rule>
  LOCO_DEVICE T at_value(const Task<Rule, T>& task, uint32_t value) const {
    return table ? table[value] : task.coefficient(value);
  }
};

// The dtype w_ of parameters and gradients, and state_ of states, for kernels that process 16 bytes at a time.
template <DType w_, DType state_>
struct VectorTypes {
  static constexpr DType w = w_, state = state_;
  // Elements of the parameter in 16 bytes.
  static constexpr int width = w == DType::f64 ? 2 : w == DType::f32 ? 4 : 8;
  // Elements that step_packed updates at a time. There are fewer with stochastic rounding, whose random words take many
  // registers.
  template <bool stochastic>
  static constexpr int taken = stochastic || w == DType::f64 ? 2 : 4;
  using T = std::conditional_t<w == DType::f64, double, float>;
};

template <int n, typename T>
LOCO_DEVICE void decay_all(Decay decay, T (&w)[n], T (&g)[n], const T (&c)[n]) {
#pragma unroll
  for (int k = 0; k < n; ++k) apply_decay(decay, w[k], g[k], c[k]);
}

// Turns n gradients into those of what is minimised, and applies the decay. Options are looked at once for all.
template <int n, class Rule, typename T>
LOCO_DEVICE void decay_all(const Task<Rule, T>& task, T (&w)[n], T (&g)[n], const T (&c)[n]) {
  if (task.p.options.maximize) {
#pragma unroll
    for (int k = 0; k < n; ++k) g[k] = -g[k];
  }
  if (task.flags.decay == Decay::l2) {
    decay_all(Decay::l2, w, g, c);
  } else if (task.flags.decay == Decay::decoupled) {
    decay_all(Decay::decoupled, w, g, c);
  } else if (task.flags.decay == Decay::l1) {
    decay_all(Decay::l1, w, g, c);
  }
}

// Moves n elements after the decay. metric: output for a prox that follows.
template <int n, class Rule, typename T>
LOCO_DEVICE void move_each(const Task<Rule, T>& task, T (&w)[n], const T (&d)[n], T (&state)[kStates][n],
                           T (&metric)[n]) {
#pragma unroll
  for (int k = 0; k < n; ++k) {
    T of_element[kStates] = {state[0][k], state[1][k], state[2][k]};
    metric[k] = move(w[k], d[k], of_element, task.flags, task.scalars);
#pragma unroll
    for (int j = 0; j < kStates; ++j) state[j][k] = of_element[j];
  }
}

// Moves n elements after the decay by the rule's arithmetic for many elements.
template <class Rule, typename T>
struct MoveAll {
  LOCO_DEVICE explicit MoveAll(const Task<Rule, T>&) {}

  template <int n>
  LOCO_DEVICE void operator()(const Task<Rule, T>& task, T (&w)[n], const T (&d)[n], T (&state)[kStates][n]) const {
    T unused[n];
    move_each(task, w, d, state, unused);
  }
};

// Conditions that are the same for all elements are tested once for all of them, as is whether the quotients need
// CUDA's operators.
template <>
struct MoveAll<Adam, float> {
  AdamMoves moves;

  LOCO_DEVICE explicit MoveAll(const Task<Adam, float>& task) : moves(task.scalars) {}

  template <int n>
  LOCO_DEVICE void operator()(const Task<Adam, float>& task, float (&w)[n], const float (&d)[n],
                              float (&state)[kStates][n]) const {
    const AdamScalars<float>& s = task.scalars;
    auto& [m, v, v_max] = state;
    if (s.lerp_from_end) {
#pragma unroll
      for (int k = 0; k < n; ++k) update_moments(d[k], m[k], v[k], true, s);
    } else {
#pragma unroll
      for (int k = 0; k < n; ++k) update_moments(d[k], m[k], v[k], false, s);
    }
    float moved[n];
    bool covered = moves.covers();
    if (task.flags.amsgrad) {
#pragma unroll
      for (int k = 0; k < n; ++k) moved[k] = moves(m[k], v_max[k] = larger(v[k], v_max[k]), s, covered);
    } else {
#pragma unroll
      for (int k = 0; k < n; ++k) moved[k] = moves(m[k], v[k], s, covered);
    }
    if (!covered) {
#pragma unroll
      for (int k = 0; k < n; ++k) {
        moved[k] = s.negative_step_size * m[k] / adam_denominator(task.flags.amsgrad ? v_max[k] : v[k], s);
      }
    }
#pragma unroll
    for (int k = 0; k < n; ++k) w[k] = w[k] + moved[k];
  }
};

// Draws random words for n elements from i on: [0] for the parameter, [1 + k] for state k.
template <int n, class Rule, typename T>
LOCO_DEVICE void draw_all(const Task<Rule, T>& task, int64_t i, uint32_t (&random)[1 + kStates][n]) {
#pragma unroll
  for (int k = 0; k < n; ++k) {
    uint32_t words[1 + kStates];
    task.draw(i + k, words);
#pragma unroll
    for (int j = 0; j <= kStates; ++j) random[j][k] = words[j];
  }
}

// Addresses of the elements from a task's first one on, for a loop: the entry would be read again after every store.
template <class Types, class Rule>
struct Addresses {
  void *w, *g, *state[Rule::states];
  bool g_aligned;

  template <typename T>
  LOCO_DEVICE explicit Addresses(const Task<Rule, T>& task) {
    w = static_cast<Stored<Types::w>*>(task.entry.w) + task.begin;
    g = static_cast<Stored<Types::w>*>(task.g) + task.begin;
#pragma unroll
    for (int k = 0; k < Rule::states; ++k) {
      void* const first = task.entry.state[k];
      state[k] = first ? static_cast<Stored<Types::state>*>(first) + task.begin : nullptr;
    }
    g_aligned = task.g_aligned();
  }
};

// Updates the elements in 16 bytes of the parameter; every operand but the gradient must reach a 16-byte boundary at
// the first.
template <class Types, class Rule, typename T>
LOCO_DEVICE void step_vector(const Task<Rule, T>& task, const Addresses<Types, Rule>& of, const Cycle<T>& cycle,
                             const typename Cycle<T>::Position& position, const MoveAll<Rule, T>& move_all,
                             uint32_t offset) {
  constexpr int N = Types::width;
  T w[N], g[N], state[kStates][N], c[N];
  load_vector<Types::w, N>(of.w, offset, w);
  load_vector<Types::w, N>(of.g, offset, g, of.g_aligned);
#pragma unroll
  for (int k = 0; k < Rule::states; ++k) {
    if (task.flags.uses(k)) load_vector<Types::state, N>(of.state[k], offset, state[k]);
  }
  if (task.p.grad_scale.data) {
    const T scale = task.grad_scale();
#pragma unroll
    for (int k = 0; k < N; ++k) g[k] = g[k] / scale;
    store_vector<Types::w, N>(of.g, offset, g, of.g_aligned);
  }
  cycle.read(task, position, c);
  decay_all(task, w, g, c);
  move_all(task, w, g, state);
  store_vector<Types::w, N>(of.w, offset, w);
#pragma unroll
  for (int k = 0; k < Rule::states; ++k) {
    if (task.flags.uses(k)) store_vector<Types::state, N>(of.state[k], offset, state[k]);
  }
}

// Does the same as step_vector for kernels that are short of registers: only the few elements being updated are
// converted, and all others stay in their stored type.
// keep(w, metrics, random words or null) stores the parameter's elements.
template <class Types, bool stochastic, class Rule, typename T, class Keep>
LOCO_DEVICE void step_packed(const Task<Rule, T>& task, const Cycle<T>& cycle, uint32_t offset, const Keep& keep) {
  constexpr int n = Types::template taken<stochastic>;
  const Entry& e = task.entry;
  const int64_t i = task.begin + offset;
  const bool is_scaled = task.p.grad_scale.data != nullptr;
  Packed<Types::w, Types::width> all_w, all_g;
  // Absent states are zeroed: registers that are never set would stay live from vector to vector and be spilled.
  Packed<Types::state, Types::width> all_state[kStates] = {};
  all_w.load(e.w, i);
  all_g.load(task.g, i, task.g_aligned());
#pragma unroll
  for (int k = 0; k < Rule::states; ++k) {
    if (e.state[k]) all_state[k].load(e.state[k], i);
  }
#pragma unroll 1
  for (int begin = 0; begin < Types::width; begin += n) {
    T w[n], g[n], state[kStates][n] = {}, c[n], metric[n];
    all_w.front(w);
    all_w.template pop<n>();
    all_g.front(g);
#pragma unroll
    for (int k = 0; k < Rule::states; ++k) all_state[k].front(state[k]);
    cycle.read(task, cycle.at(offset + begin), c);
    if (is_scaled) {
#pragma unroll
      for (int k = 0; k < n; ++k) g[k] = g[k] / task.grad_scale();
      all_g.push(g);
    } else {
      all_g.template pop<n>();
    }
    decay_all(task, w, g, c);
    move_each(task, w, g, state, metric);
    uint32_t random[1 + kStates][n];
    if constexpr (stochastic) draw_all(task, i + begin, random);
    keep(w, metric, stochastic ? random[0] : nullptr);
#pragma unroll
    for (int k = 0; k < Rule::states; ++k) all_state[k].push(state[k], stochastic ? random[1 + k] : nullptr);
  }
  if (is_scaled) all_g.store(task.g, i, task.g_aligned());
#pragma unroll
  for (int k = 0; k < Rule::states; ++k) {
    if (e.state[k]) all_state[k].store(e.state[k], i);
  }
}

// The steps of entries with a penalty (cuda_prox.cu).

// Returns the bytes of GPU memory needed for filters that are too large for a block's shared memory.
int64_t prox_bytes(const GpuTable& table);

// Launches the kernels of this step. memory: prox_bytes of GPU memory, aligned to 16 bytes.
template <class Rule>
void step_with_prox(const CudaCall& call, const Parameters<Rule>& p, unsigned char* memory);

}  // namespace loco::optim_step
