// Norms and prox of nested groups on the CPU, without torch: plain structs in. Each filter (one output channel's
// weights) is solved by itself.
#pragma once

#include <cstdint>

#include "common/operand.h"
#include "common/parallel.h"
#include "ring_prox/penalty.h"

namespace loco::ring_prox {

// The weights of all filters. Filter o lies at `operand` moved by o * stride; the operand's nest describes one filter.
struct Filters {
  Operand operand;  // data is null if the tensor is absent
  int64_t stride;   // in elements
};

struct Call {
  int64_t filters;
  Shape shape;
  ParallelFor parallel_for;
  Filters weight;
  // The following members are for the prox.
  Filters metric = {}, out = {};
  // t and q of math.h, [filters, rings], or [rings] with a stride of 0. `squared` may be null.
  const double *thresholds = nullptr, *squared = nullptr;
  int64_t thresholds_stride = 0;
  bool linf = false;
};

// T is the type weights are converted to for the computation, float or double. norms: [filters, rings].
template <typename T>
void norms_cpu(const Call& call, double* norms);
template <typename T>
void prox_cpu(const Call& call);

}  // namespace loco::ring_prox
