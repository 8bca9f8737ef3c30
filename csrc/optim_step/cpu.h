// The optimizer step on the CPU, without torch: plain structs in, memory updated in place.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/strided.h"

namespace loco::optim_step {

constexpr int kStates = 3;

struct Operand {
  void* data;  // null: absent
  DType dtype;
  const Nest* nest;  // null: flat

  bool flat() const { return nest == nullptr; }
};

// A parameter and everything that steps with it. All nests, which the caller owns, walk the elements in the parameter's
// memory order.
struct TensorStep {
  int64_t numel;
  Operand w, g, state[kStates];
  const double* map;  // null: uniform decay
  const Nest* map_nest;
  const Nest* logical_nest;  // the element's index in a contiguous tensor of the same shape; null: the same index
  int64_t group;             // row of hyper
  bool first;                // SGD: the momentum buffer is to be written, not read
  double step;               // Adam: the number of this step, from 1
  uint32_t ordinal;          // which parameter this is, for stochastic rounding
};

struct Rounding {
  bool stochastic;
  uint64_t seed;
  uint32_t step;
};

// Runs body(begin, end, context) over pieces of [begin, end), in parallel if that is longer than grain.
using ParallelFor = void (*)(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*),
                             void* context);

struct Call {
  const TensorStep* tensors;
  int64_t count;
  const double* hyper;  // [groups, columns], see SgdColumn and AdamColumn
  bool maximize;
  bool l1;
  double grad_scale;  // 0: none; else gradients are divided by it, in memory too
  Rounding rounding;
  ParallelFor parallel_for;
  int64_t threads;  // that parallel_for uses at most
};

struct SgdCall : Call {
  bool nesterov;
};

struct AdamCall : Call {
  bool amsgrad;
  bool decoupled;
};

enum SgdColumn { kSgdLr, kSgdWeightDecay, kSgdMomentum, kSgdDampening, kSgdColumns };
enum AdamColumn { kAdamLr, kAdamWeightDecay, kAdamBeta1, kAdamBeta2, kAdamEps, kAdamColumns };

void step_cpu(const SgdCall& call);
void step_cpu(const AdamCall& call);

// The instruction set that this machine's clones were chosen for.
const char* cpu_capability();

}  // namespace loco::optim_step
