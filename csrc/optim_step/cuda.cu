// The optimizer step on an NVIDIA GPU, for entries without a penalty: w, state <- rule(w, g, state) for each element
// (math.h).
//
// p: the launch's parameters; gpu_task.h gives the shapes of its arrays, which are contiguous and in global memory.
// Entry::w, Entry::state[k] and p.grads[entry] are [numel]. Elements are numbered in the parameter's memory order, and
// element i is at the offset that the operand's nest gives, or at i if the nest is kFlat. Entry::counter is a
// single element.
//
// One block steps one chunk of an entry; a launch covers all chunks of the same types. If all operands are flat, and
// all but the gradient reach a 16-byte boundary at the same element, a thread processes 16 bytes of each at a time; a
// gradient that does not is loaded element by element, as it is where it is part of a larger buffer (torch's DDP).
// Elements before the first boundary, after the last whole vector, and in all other entries are processed one at a
// time. For a rule that counts steps, `prepare` runs before these launches with one thread per entry.
#include "common/launch.h"
#include "common/mistake.h"
#include "optim_step/cuda.h"
#include "optim_step/gpu_task.h"

namespace loco::optim_step {
namespace {

constexpr int kThreads = 256;
// Least number of resident blocks per multiprocessor: having many accesses in flight hides their latency.
constexpr int kBlocks = 3;
constexpr int kBlocksOfMany = 2;  // least number for kernels that need many registers

// Increments each entry's step counter and computes the scalars of its step. One thread handles one entry.
template <class Rule>
__global__ void __launch_bounds__(kThreads) prepare(const __grid_constant__ Parameters<Rule> p, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count || (!LOCO_MISTAKE(step_found_inf) && is_set(p.found_inf))) return;
  const Entry& entry = p.entries[i];
  const double step = count_step(entry.counter, entry.counter_is_double);
  p.scalars[i] = Rule::scalars(row_of(p, entry), lr_of(p, entry), step);
}

// Returns the first element of a chunk.
template <class Rule>
LOCO_DEVICE int64_t begin_of(const Parameters<Rule>& p, const Chunk& chunk) {
  return chunk.index == 0 ? 0 : p.entries[chunk.entry].head + chunk.index * kPart;
}

// Returns the number of elements of a chunk.
template <class Rule>
LOCO_DEVICE uint32_t count_of(const Parameters<Rule>& p, const Chunk& chunk) {
  const Entry& entry = p.entries[chunk.entry];
  const int64_t end = entry.head + (int64_t{chunk.index} + chunk.parts) * kPart + LOCO_MISTAKE(step_chunk);
  return static_cast<uint32_t>((end < entry.numel ? end : entry.numel) - begin_of(p, chunk));
}

template <class Rule, typename T>
LOCO_DEVICE void step_and_store(const Task<Rule, T>& task, uint32_t offset) {
  const Entry& e = task.entry;
  step_one(task, offset,
           [&](T w, T, int64_t at, uint32_t random) { store_any(e.w_dtype, e.w, at, w, task.stochastic(), random); });
}

// Steps a chunk element by element.
template <class Rule, typename T>
__global__ void __launch_bounds__(kThreads, kBlocksOfMany)
    step_elements(const __grid_constant__ Parameters<Rule> p, int64_t first_chunk) {
  if (is_set(p.found_inf)) return;
  const Chunk chunk = p.chunks[first_chunk + blockIdx.x];
  const Task<Rule, T> task(p, chunk.entry, begin_of(p, chunk));
  const uint32_t count = count_of(p, chunk);
  for (uint32_t k = threadIdx.x; k < count; k += kThreads) step_and_store(task, k);
}

// Steps the elements in 16 bytes of the parameter with stochastic rounding.
template <class Types, class Rule, typename T>
LOCO_DEVICE void step_stochastically(const Task<Rule, T>& task, const Cycle<T>& cycle, uint32_t offset) {
  constexpr int n = Types::template taken<true>;
  Packed<Types::w, Types::width> kept;
  const auto keep = [&](const T(&w)[n], const T(&)[n], const uint32_t* random) { kept.push(w, random); };
  step_packed<Types, true>(task, cycle, offset, keep);
  kept.store(task.entry.w, task.begin + offset);
}

// Steps a chunk 16 bytes at a time.
template <class Rule, class Types, bool stochastic>
__global__ void __launch_bounds__(kThreads, stochastic || sizeof(typename Types::T) == 8 ? kBlocksOfMany : kBlocks)
    step_vectors(const __grid_constant__ Parameters<Rule> p, int64_t first_chunk) {
  using T = typename Types::T;
  constexpr uint32_t width = Types::width;
  __shared__ T table[kCached];
  if (is_set(p.found_inf)) return;
  const Chunk chunk = p.chunks[first_chunk + blockIdx.x];
  const Task<Rule, T> task(p, chunk.entry, begin_of(p, chunk));
  const Cycle<T> cycle(task, table, kCached);
  const uint32_t count = count_of(p, chunk), head = chunk.index == 0 ? task.entry.head : 0;
  const uint32_t tail = count - (count - head) % width;
  // There are fewer than 8 elements before the vectors, and fewer than 8 after them; each is stepped by one thread.
  // They come first, so that nothing they need takes registers in the loop.
  const uint32_t end = threadIdx.x < head ? threadIdx.x : tail + threadIdx.x - head + LOCO_MISTAKE(step_tail);
  if (end < head || (end >= tail && end < count)) step_and_store(task, end);
  const uint32_t begin = head + threadIdx.x * width;
  constexpr uint32_t stride = kThreads * width;
  if constexpr (stochastic) {
    for (uint32_t k = begin; k < tail; k += stride) step_stochastically<Types>(task, cycle, k);
  } else {
    const Addresses<Types, Rule> addresses(task);
    const MoveAll<Rule, T> move_all(task);
    auto position = cycle.at(begin);
    const auto distance = cycle.distance(stride);
    for (uint32_t k = begin; k < tail; k += stride) {
      step_vector<Types>(task, addresses, cycle, position, move_all, k);
      cycle.advance(position, distance);
    }
  }
}

// Returns the bytes of the scalars of all entries, rounded up to a multiple of 16; 0 if the rule counts no steps.
template <class Rule>
int64_t scalar_bytes(const GpuTable& table) {
  const int64_t bytes = table.entry_count * static_cast<int64_t>(sizeof(typename Rule::template Scalars<double>));
  return Rule::counts_steps ? (bytes + 15) / 16 * 16 : 0;
}

template <class Rule>
Parameters<Rule> parameters_of(const CudaCall& call) {
  const GpuTable& t = *call.table;
  const unsigned char* const table = LOCO_MISTAKE(step_host_pointer) ? t.bytes.data() : call.memory;
  const auto at = [&](int64_t offset) { return table + offset; };
  Parameters<Rule> p;
  p.grads = reinterpret_cast<void* const*>(at(t.grads));
  p.hyper = reinterpret_cast<const double*>(at(t.hyper));
  p.lrs = t.has_lrs ? reinterpret_cast<const DeviceScalar*>(at(t.lrs)) : nullptr;
  p.entries = reinterpret_cast<const Entry*>(at(t.entries));
  p.nests = reinterpret_cast<const Nest*>(at(t.nests));
  p.maps = reinterpret_cast<const double*>(at(t.maps));
  p.chunks = reinterpret_cast<const Chunk*>(at(t.chunks));
  const auto scratch = reinterpret_cast<typename Rule::template Scalars<double>*>(call.scratch);
  p.scalars = scalar_bytes<Rule>(t) > 0 ? scratch : nullptr;
  p.options = call.options;
  p.grad_scale = call.grad_scale;
  p.found_inf = call.found_inf;
  p.rounding = call.rounding;
  return p;
}

// Calls visit(VectorTypes, whether bfloat16 is rounded stochastically) for types below Types::any.
template <class Visit>
void with_vector_types(Types types, bool stochastic, const Visit& visit) {
  constexpr std::false_type nearest;
  if (types == Types::f32) return visit(VectorTypes<DType::f32, DType::f32>(), nearest);
  if (types == Types::f64) return visit(VectorTypes<DType::f64, DType::f64>(), nearest);
  if (types == Types::f16) return visit(VectorTypes<DType::f16, DType::f16>(), nearest);
  if (types == Types::f16_f32) return visit(VectorTypes<DType::f16, DType::f32>(), nearest);
  const auto bf16 = [&](auto vector) { stochastic ? visit(vector, std::true_type()) : visit(vector, nearest); };
  types == Types::bf16 ? bf16(VectorTypes<DType::bf16, DType::bf16>()) : bf16(VectorTypes<DType::bf16, DType::f32>());
}

template <class Rule>
void launch(const Parameters<Rule>& p, const Work& work, void* stream) {
  const auto blocks = static_cast<unsigned>(work.count);
  const auto types = static_cast<Types>(work.kind);
  if (types == Types::any) {
    LOCO_LAUNCH((step_elements<Rule, float>), blocks, kThreads, stream, p, work.first);
  } else if (types == Types::any_f64) {
    LOCO_LAUNCH((step_elements<Rule, double>), blocks, kThreads, stream, p, work.first);
  } else {
    with_vector_types(types, p.rounding.stochastic, [&](auto vector, auto stochastic) {
      LOCO_LAUNCH((step_vectors<Rule, decltype(vector), decltype(stochastic)::value>), blocks, kThreads, stream, p,
                  work.first);
    });
  }
}

}  // namespace

template <class Rule>
int64_t scratch_bytes(const GpuTable& table) {
  return scalar_bytes<Rule>(table) + prox_bytes(table);
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
  step_with_prox(call, p, call.scratch + scalar_bytes<Rule>(*call.table));
}

template int64_t scratch_bytes<Sgd>(const GpuTable& table);
template int64_t scratch_bytes<Adam>(const GpuTable& table);
template void step_cuda<Sgd>(const CudaCall& call);
template void step_cuda<Adam>(const CudaCall& call);

}  // namespace loco::optim_step
