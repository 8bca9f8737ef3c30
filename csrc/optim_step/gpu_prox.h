// What the kernels that end a step with a prox share: their parameters, and how a kernel (output channel) is updated
// and written.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim_step/gpu_task.h"
#include "ring_prox/gpu_rings.h"
#include "ring_prox/gpu_solve.h"

namespace loco::optim_step {

using ring_prox::kMaxRings;
using ring_prox::kMostThreads;
using ring_prox::Ordered;
using ring_prox::Rings;
using ring_prox::Span;
using ring_prox::Walk;

constexpr int kProxBlocks = 2;           // on a multiprocessor, at least
constexpr uint32_t kCoefficients = 256;  // of a cyclic map that a block keeps in shared memory

// For the factor that kernels which are shrunk together share.
struct Search {
  ring_prox::FactorSearch factor;
  bool found;
};

// What a launch reads beside the parameters of all.
struct ProxParameters {
  const Prox* proxes;
  const ring_prox::Tap* taps;
  const uint32_t* begins;
  const double* thresholds;
  int64_t first_chunk, chunks, kernels;
  unsigned char* slots;
  int64_t slot_bytes;
  // Where kernels are shrunk together.
  unsigned char* held;  // all of them
  Search* searches;     // [chunks]
  double* shares;       // [kernels]

  // Which of the launch's chunks kernel k of it belongs to.
  LOCO_DEVICE int64_t find(const Chunk* of_launch, int64_t k) const {
    int64_t low = 0, high = chunks;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (of_launch[middle].index <= k ? low : high) = middle;
    }
    return low;
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
  for (int n = threadIdx.x; n < prox.rings; n += blockDim.x) {
    // Read here, as prox.squared is: variables above take two registers more.
    const double step = task.prox_step();
    plain[n] = step * q.thresholds[prox.plain + n];
    if (prox.squared >= 0) squared[n] = std::sqrt(step) * q.thresholds[prox.squared + n];
  }
  return {plain, prox.squared >= 0 ? squared : nullptr};
}

// A kernel in global memory where it is held until all of its layer have been updated.
template <class Rule, typename T>
struct HeldKernel {
  T* weights;
  double* squares;  // of its rings, and behind them what its weights have been scaled by for that

  LOCO_DEVICE HeldKernel(const ProxParameters& q, const Entry& entry, const Rings& rings, int64_t kernel) {
    constexpr bool is_double = sizeof(T) == 8;
    const int64_t bytes = bytes_of_held_kernel(rings.numel(), rings.count, is_double, Rule::has_metric);
    unsigned char* const memory = q.held + entry.held * kHeldUnit + kernel * bytes;
    weights = reinterpret_cast<T*>(memory);
    squares = reinterpret_cast<double*>(memory + bytes_of_kernel(rings.numel(), is_double, Rule::has_metric));
  }

  LOCO_DEVICE Ordered<T, false> ordered(const Rings& rings) const {
    return {rings, weights, Rule::has_metric ? weights + rings.numel() : nullptr};
  }
};

}  // namespace loco::optim_step
