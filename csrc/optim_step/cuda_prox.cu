// One block steps one kernel (output channel) of a parameter with a penalty, and ends with its prox.
//
// 1. It updates the weights as cuda.cu does, but keeps them on chip: in shared memory, in the type that arithmetic is
//    done in, in ring order, with their metrics where the rule has one. A kernel that is too large for that goes to a
//    slot of global memory; blocks with slots take one kernel after the other.
// 2. It solves for the scalars of the prox (ring_prox/gpu_solve.h).
// 3. It writes every weight, rounded once, in the order of memory.
// Kernels of all entries that the same number of threads suits share a launch.
#include <algorithm>
#include <cmath>

#include "common/launch.h"
#include "optim_step/cuda_prox.h"
#include "ring_prox/gpu_rings.h"
#include "ring_prox/gpu_solve.h"

namespace loco::optim_step {
namespace {

using ring_prox::kMaxRings;
using ring_prox::kMostThreads;
using ring_prox::Ordered;
using ring_prox::Rings;
using ring_prox::Span;
using ring_prox::Walk;

constexpr int kBlocks = 2;               // on a multiprocessor, at least
constexpr int64_t kSlots = 304;          // as many blocks as the largest GPUs hold at least
constexpr uint32_t kCoefficients = 256;  // of a cyclic map that a block keeps in shared memory

// What a launch reads beside the parameters of all.
struct ProxParameters {
  const Prox* proxes;
  const ring_prox::Tap* taps;
  const uint32_t* begins;
  const double* thresholds;
  int64_t first_chunk, chunks, kernels;
  unsigned char* slots;
  int64_t slot_bytes;

  // The entry that kernel k of the launch belongs to, with the number of its first.
  LOCO_DEVICE Chunk find(const Chunk* all, int64_t k) const {
    const Chunk* chunks_of_launch = all + first_chunk;
    int64_t low = 0, high = chunks;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (chunks_of_launch[middle].index <= k ? low : high) = middle;
    }
    return chunks_of_launch[low];
  }

  LOCO_DEVICE Rings rings(const Prox& prox) const {
    return {taps + prox.taps, begins + prox.begins, prox.channels, prox.tap_count, prox.rings, prox.channels_fastest};
  }
};

// Where the parameter's elements lie as vectors, if all operands do.
LOCO_DEVICE Span span_of(const Entry& entry, int64_t begin, uint32_t count, bool vectors) {
  if (!vectors) return Span(count);
  const uint32_t size = static_cast<uint32_t>(element_size(entry.w_dtype));
  return Span(static_cast<const char*>(entry.w) + begin * size, count, size);
}

template <class Types, bool stochastic = false, class Rule, typename T, bool on_chip>
LOCO_DEVICE void update_vectors(const Task<Rule, T>& task, const Cycle<T>& cycle, const Span& span,
                                const Ordered<T, on_chip>& kernel) {
  constexpr int taken = Types::template taken<stochastic>;
  for (uint32_t k = threadIdx.x; k < span.vectors; k += blockDim.x) {
    const uint32_t offset = span.head + k * Types::width;
    Walk walk(kernel.rings, offset);
    const auto keep = [&](const T(&w)[taken], const T(&metric)[taken], const uint32_t*) {
#pragma unroll
      for (int n = 0; n < taken; ++n) kernel.put(walk.place(), w[n], metric[n]), walk.next();
    };
    step_packed<Types, stochastic>(task, cycle, offset, keep);
  }
}

template <class Types, class Rule, typename T, bool on_chip>
LOCO_DEVICE void update_bf16_vectors(const Task<Rule, T>& task, const Cycle<T>& cycle, const Span& span,
                                     const Ordered<T, on_chip>& kernel) {
  if (task.stochastic()) return update_vectors<Types, true>(task, cycle, span, kernel);
  update_vectors<Types>(task, cycle, span, kernel);
}

// Updates the elements of a kernel and puts them in ring order.
template <class Rule, typename T, bool on_chip>
LOCO_DEVICE void update_kernel(const Task<Rule, T>& task, const Ordered<T, on_chip>& kernel, T* coefficients) {
  const Types types = task.entry.types;
  const Span span = span_of(task.entry, task.begin, kernel.rings.numel(), types < Types::any);
  const Cycle<T> cycle(task, coefficients, kCoefficients);
  if constexpr (sizeof(T) == 8) {
    update_vectors<VectorTypes<DType::f64, DType::f64>>(task, cycle, span, kernel);
  } else if (types == Types::f32) {
    update_vectors<VectorTypes<DType::f32, DType::f32>>(task, cycle, span, kernel);
  } else if (types == Types::bf16) {
    update_bf16_vectors<VectorTypes<DType::bf16, DType::bf16>>(task, cycle, span, kernel);
  } else if (types == Types::f16) {
    update_vectors<VectorTypes<DType::f16, DType::f16>>(task, cycle, span, kernel);
  } else if (types == Types::bf16_f32) {
    update_bf16_vectors<VectorTypes<DType::bf16, DType::f32>>(task, cycle, span, kernel);
  } else if (types == Types::f16_f32) {
    update_vectors<VectorTypes<DType::f16, DType::f32>>(task, cycle, span, kernel);
  }
  for (uint32_t k = threadIdx.x; k < span.ends(); k += blockDim.x) {
    const uint32_t offset = span.end(k);
    step_one(task, offset,
             [&](T w, T metric, int64_t, uint32_t) { kernel.put(Walk(kernel.rings, offset).place(), w, metric); });
  }
}

template <DType dtype, bool stochastic = false, class Rule, typename T, class At>
LOCO_DEVICE void write_vectors(const Task<Rule, T>& task, const Rings& rings, const Span& span, const At& at) {
  using Types = VectorTypes<dtype, dtype>;
  constexpr int width = Types::width, taken = Types::template taken<stochastic>;
  for (uint32_t k = threadIdx.x; k < span.vectors; k += blockDim.x) {
    const uint32_t offset = span.head + k * width;
    Packed<dtype, width> kept;
    Walk walk(rings, offset);
#pragma unroll 1
    for (int done = 0; done < width; done += taken) {
      T values[taken];
      uint32_t random[taken];
#pragma unroll
      for (int n = 0; n < taken; ++n) {
        values[n] = at(walk), walk.next();
        if constexpr (stochastic) {
          uint32_t words[1 + kStates];
          task.draw(task.begin + offset + done + n, words);
          random[n] = words[0];
        }
      }
      kept.push(values, stochastic ? random : nullptr);
    }
    kept.store(task.entry.w, task.begin + offset);
  }
}

// at(walk): the weight that it has come to.
template <class Rule, typename T, class At>
LOCO_DEVICE void write_kernel(const Task<Rule, T>& task, const Rings& rings, const At& at) {
  const Entry& e = task.entry;
  const Span span = span_of(e, task.begin, rings.numel(), e.nests[kNestW] == kFlat);
  if constexpr (sizeof(T) == 8) {
    write_vectors<DType::f64>(task, rings, span, at);
  } else if (e.w_dtype == DType::f32) {
    write_vectors<DType::f32>(task, rings, span, at);
  } else if (task.stochastic()) {
    write_vectors<DType::bf16, true>(task, rings, span, at);
  } else if (e.w_dtype == DType::bf16) {
    write_vectors<DType::bf16>(task, rings, span, at);
  } else {
    write_vectors<DType::f16>(task, rings, span, at);
  }
  for (uint32_t k = threadIdx.x; k < span.ends(); k += blockDim.x) {
    const uint32_t offset = span.end(k);
    const int64_t i = task.begin + offset;
    uint32_t words[1 + kStates] = {};
    if (task.stochastic()) task.draw(i, words);
    const int64_t place = offset_in(task.p.nests, e.nests[kNestW], i, task.narrow());
    store_any(e.w_dtype, e.w, place, at(Walk(rings, offset)), task.stochastic(), words[0]);
  }
}

// The thresholds of the task's kernel, for a step of its size.
template <class Rule, typename T>
LOCO_DEVICE ring_prox::Thresholds scaled_thresholds(const ProxParameters& q, const Prox& prox,
                                                    const Task<Rule, T>& task, double* plain, double* squared) {
  const bool has_squared = prox.squared >= 0;
  const int64_t kernel = task.begin / (prox.channels * prox.tap_count);
  const double factor = prox.factors ? in_global(prox.factors)[kernel] : 1;
  const double step = task.prox_step();
  for (int n = threadIdx.x; n < prox.rings; n += blockDim.x) {
    plain[n] = factor * (step * q.thresholds[prox.plain + n]);
    if (has_squared) squared[n] = factor * (std::sqrt(step) * q.thresholds[prox.squared + n]);
  }
  return {plain, has_squared ? squared : nullptr};
}

template <class Rule, typename T, bool on_chip>
__global__ void __launch_bounds__(kMostThreads, kBlocks)
    step_kernels(const __grid_constant__ Parameters<Rule> p, const __grid_constant__ ProxParameters q) {
  __shared__ ring_prox::Scratch scratch;
  __shared__ ring_prox::AnySolver<Rule::has_metric> solver;
  __shared__ double plain[kMaxRings], squared[kMaxRings];
  __shared__ T coefficients[kCoefficients];
  LOCO_SHARED(memory);
  if (is_set(p.found_inf)) return;
  for (int64_t k = blockIdx.x; k < q.kernels; k += gridDim.x) {
    const Chunk chunk = q.find(p.chunks, k);
    const Prox& prox = q.proxes[p.entries[chunk.entry].prox];
    const Rings rings = q.rings(prox);
    const Task<Rule, T> task(p, chunk.entry, (k - chunk.index) * rings.numel());
    T* const weights = reinterpret_cast<T*>(on_chip ? memory : q.slots + blockIdx.x * q.slot_bytes);
    const Ordered<T, on_chip> kernel{rings, weights, Rule::has_metric ? weights + rings.numel() : nullptr};
    __syncthreads();  // all have written the kernel before
    update_kernel(task, kernel, coefficients);
    const ring_prox::Thresholds thresholds = scaled_thresholds(q, prox, task, plain, squared);
    __syncthreads();
    ring_prox::Sums<T, Ordered<T, on_chip>> sums(kernel, rings.count, scratch);
    solver.solve(prox.linf, sums, thresholds);
    write_kernel(task, rings, [&](const Walk& walk) {
      const uint32_t i = walk.place();
      return solver.shrunk(prox.linf, kernel.weight(i), kernel.metric(i), walk.ring());
    });
  }
}

int64_t blocks_of(const ProxWork& work) { return work.on_chip ? work.kernels : std::min(work.kernels, kSlots); }

template <class Rule, typename T>
void launch(const Parameters<Rule>& p, const ProxParameters& q, const ProxWork& work, void* stream) {
  const auto blocks = static_cast<unsigned>(blocks_of(work)), bytes = static_cast<unsigned>(work.bytes);
  if (work.on_chip) {
    LOCO_LAUNCH_SHARED((step_kernels<Rule, T, true>), blocks, work.threads, bytes, stream, p, q);
  } else {
    LOCO_LAUNCH((step_kernels<Rule, T, false>), blocks, work.threads, stream, p, q);
  }
}

}  // namespace

int64_t slot_bytes(const GpuTable& table) {
  int64_t most = 0;
  for (const ProxWork& work : table.prox_works) {
    if (!work.on_chip) most = std::max(most, blocks_of(work) * work.bytes);
  }
  return most;
}

template <class Rule>
void step_with_prox(const CudaCall& call, const Parameters<Rule>& p, unsigned char* slots) {
  const GpuTable& t = *call.table;
  ProxParameters q{};
  q.proxes = reinterpret_cast<const Prox*>(call.memory + t.proxes);
  q.taps = reinterpret_cast<const ring_prox::Tap*>(call.memory + t.taps);
  q.begins = reinterpret_cast<const uint32_t*>(call.memory + t.begins);
  q.thresholds = reinterpret_cast<const double*>(call.memory + t.thresholds);
  q.slots = slots;
  for (const ProxWork& work : t.prox_works) {
    q.first_chunk = work.first, q.chunks = work.count, q.kernels = work.kernels, q.slot_bytes = work.bytes;
    work.is_double ? launch<Rule, double>(p, q, work, call.stream) : launch<Rule, float>(p, q, work, call.stream);
  }
}

template void step_with_prox<Sgd>(const CudaCall&, const Parameters<Sgd>&, unsigned char*);
template void step_with_prox<Adam>(const CudaCall&, const Parameters<Adam>&, unsigned char*);

}  // namespace loco::optim_step
