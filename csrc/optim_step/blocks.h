// The inner loops on the CPU: each applies an update rule to a block of consecutive elements, compiled for several
// instruction sets.
#pragma once

#include <cstdint>

#include "common/capability.h"
#include "optim_step/rules.h"

namespace loco::optim_step {

// Contiguous elements in the compute dtype T. All pointers but table are [count] with stride 1.
template <typename T>
struct Block {
  int64_t count;
  T* w;
  const T* g;
  T* state[3];     // momentum_buffer; or exp_avg, exp_avg_sq, max_exp_avg_sq; null: the rule has no such state
  const T* table;  // [period], decay coefficients, used cyclically; null: uniform
  int64_t period;  // the table's length
  int64_t phase;   // the first element's index into the table
  T uniform;       // decay coefficient of all elements if table is null
  T* metric;       // output, Adam's denominators; null: not needed
};

template <typename T>
struct BlockKernels {
  // Update w, the states and the metric of a block in place (formulas: math.h).
  void (*sgd)(const Block<T>& block, SgdFlags flags, const SgdScalars<T>& scalars);
  void (*adam)(const Block<T>& block, AdamFlags flags, const AdamScalars<T>& scalars);
  void (*unscale)(T* g, int64_t count, T scale);  // g = g / scale
  void (*negate)(T* g, int64_t count);            // g = -g
};

LOCO_TABLES(avx2, BlockKernels, blocks)  // wider vectors are no faster: a step waits for memory or for divisions

template <typename T>
void update(const Block<T>& block, SgdFlags flags, const SgdScalars<T>& scalars) {
  blocks<T>().sgd(block, flags, scalars);
}
template <typename T>
void update(const Block<T>& block, AdamFlags flags, const AdamScalars<T>& scalars) {
  blocks<T>().adam(block, flags, scalars);
}

}  // namespace loco::optim_step
