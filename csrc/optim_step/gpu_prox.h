// Shared by the CUDA kernels that end a step with a prox: their parameters, and how a block updates and writes the
// weights of a filter.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/mistake.h"
#include "optim_step/gpu_task.h"
#include "ring_prox/gpu_models.h"
#include "ring_prox/gpu_rings.h"
#include "ring_prox/gpu_solve.h"

namespace loco::optim_step {

using ring_prox::AlignedSpan;
using ring_prox::kMaxRings;
using ring_prox::kMostThreads;
using ring_prox::Ordered;
using ring_prox::Rings;
using ring_prox::Walk;

constexpr int kProxBlocks = 2;  // least number of blocks per multiprocessor

// Parameters of a launch in addition to Parameters<Rule>. All arrays are contiguous and in global memory.
struct ProxParameters {
  const Prox* proxes;          // [proxes], indexed by Entry::prox
  const ring_prox::Tap* taps;  // [tap_count] of each prox, one after the other, from Prox::taps on
  const uint32_t* begins;      // [rings + 1] of each prox, from Prox::begins on
  const double* thresholds;    // [rings] for each of Prox::plain and Prox::squared
  // The launch's chunks, one per entry, and the number of filters of these entries.
  int64_t first_chunk, chunks, filters;
  unsigned char* slots;  // [blocks, slot_bytes], memory for filters that do not fit in shared memory
  int64_t slot_bytes;
  // Returns which of the launch's chunks its filter k belongs to. of_launch: [chunks].
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

// Returns how the filter's elements divide into vectors of 16 bytes and single elements. vectors: whether all operands
// can be accessed in vectors.
LOCO_DEVICE AlignedSpan span_of(const Entry& entry, int64_t begin, uint32_t count, bool vectors) {
  if (!vectors) return AlignedSpan(count);
  const uint32_t size = static_cast<uint32_t>(element_size(entry.w_dtype));
  return AlignedSpan(static_cast<const char*>(entry.w) + begin * size, count, size);
}

// Updates the elements of the span's vectors and puts them in ring order; each thread takes 16 bytes at a time.
template <class Types, bool stochastic, class Rule, typename T, bool on_chip>
LOCO_DEVICE void update_vectors(const Task<Rule, T>& task, const Cycle<T>& cycle, const AlignedSpan& span,
                                const Ordered<T, on_chip>& filter) {
  constexpr int taken = Types::template taken<stochastic>;
  for (uint32_t k = threadIdx.x; k < span.vectors; k += blockDim.x) {
    const uint32_t offset = span.head + k * Types::width;
    Walk walk(filter.rings, offset);
    const auto keep = [&](const T(&w)[taken], const T(&metric)[taken], const uint32_t*) {
#pragma unroll
      for (int n = 0; n < taken; ++n) filter.put(walk.place(), w[n], metric[n]), walk.next();
    };
    step_packed<Types, stochastic>(task, cycle, offset, keep);
  }
}

template <class Types, class Rule, typename T, bool on_chip>
LOCO_DEVICE void update_bf16_vectors(const Task<Rule, T>& task, const Cycle<T>& cycle, const AlignedSpan& span,
                                     const Ordered<T, on_chip>& filter) {
  if (task.stochastic()) return update_vectors<Types, true>(task, cycle, span, filter);
  update_vectors<Types, false>(task, cycle, span, filter);
}

// Updates all elements of a filter and puts them in ring order. The threads of a block share the work. coefficients:
// [kCachedWithProx] in shared memory.
template <class Rule, typename T, bool on_chip>
LOCO_DEVICE void update_filter(const Task<Rule, T>& task, const Ordered<T, on_chip>& filter, T* coefficients) {
  const Types types = task.entry.types;
  const AlignedSpan span = span_of(task.entry, task.begin, filter.rings.numel(), types < Types::any);
  const Cycle<T> cycle(task, coefficients, kCachedWithProx);
  if constexpr (sizeof(T) == 8) {
    update_vectors<VectorTypes<DType::f64, DType::f64>, false>(task, cycle, span, filter);
  } else if (types == Types::f32) {
    update_vectors<VectorTypes<DType::f32, DType::f32>, false>(task, cycle, span, filter);
  } else if (types == Types::bf16) {
    update_bf16_vectors<VectorTypes<DType::bf16, DType::bf16>>(task, cycle, span, filter);
  } else if (types == Types::f16) {
    update_vectors<VectorTypes<DType::f16, DType::f16>, false>(task, cycle, span, filter);
  } else if (types == Types::bf16_f32) {
    update_bf16_vectors<VectorTypes<DType::bf16, DType::f32>>(task, cycle, span, filter);
  } else if (types == Types::f16_f32) {
    update_vectors<VectorTypes<DType::f16, DType::f32>, false>(task, cycle, span, filter);
  }
  for (uint32_t k = threadIdx.x; k < span.ends(); k += blockDim.x) {
    const uint32_t offset = span.end(k);
    step_one(task, offset,
             [&](T w, T metric, int64_t, uint32_t) { filter.put(Walk(filter.rings, offset).place(), w, metric); });
  }
}

// Writes the elements of the span's vectors; each thread takes 16 bytes at a time.
template <DType dtype, bool stochastic = false, class Rule, typename T, class At>
LOCO_DEVICE void write_vectors(const Task<Rule, T>& task, const Rings& rings, const AlignedSpan& span, const At& at) {
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
          random[n] = words[LOCO_MISTAKE(step_prox_rounding)];
        }
      }
      kept.push(values, stochastic ? random : nullptr);
    }
    kept.store(task.entry.w, task.begin + offset);
  }
}

// Writes all weights of a filter, rounded to their dtype. at(walk) returns the weight that the walk has reached.
template <class Rule, typename T, class At>
LOCO_DEVICE void write_filter(const Task<Rule, T>& task, const Rings& rings, const At& at) {
  const Entry& e = task.entry;
  const AlignedSpan span = span_of(e, task.begin, rings.numel(), e.nests[kNestW] == kFlat);
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

// Returns the thresholds of the task's filter, scaled to its step size. plain, squared: [rings] in shared memory; the
// caller must synchronize the block before it reads them.
template <class Rule, typename T>
LOCO_DEVICE ring_prox::Thresholds scaled_thresholds(const ProxParameters& q, const Prox& prox,
                                                    const Task<Rule, T>& task, double* plain, double* squared) {
  for (int n = threadIdx.x; n < prox.rings; n += blockDim.x) {
    // step and prox.squared are read inside the loop: reading them before it takes two more registers.
    const double step = task.prox_step();
    plain[n] = step * q.thresholds[prox.plain + n];
    if (prox.squared >= 0)
      squared[n] = (LOCO_MISTAKE(step_prox_squared) ? step : std::sqrt(step)) * q.thresholds[prox.squared + n];
  }
  return {plain, prox.squared >= 0 ? squared : nullptr};
}

}  // namespace loco::optim_step
