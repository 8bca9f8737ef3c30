// Norms and prox of nested groups on the CPU, without torch: plain structs in. Each filter (one output channel's
// weights) is solved by itself.
#pragma once

#include <cstdint>

#include "common/operand.h"
#include "common/parallel.h"
#include "ring_prox/filter_solver.h"

namespace loco::ring_prox {

// The weights of all filters. Filter o lies at `operand` moved by o * stride; the operand's nest describes one filter.
struct Filters {
  Operand operand;  // data is null if the tensor is absent
  int64_t stride;   // in elements
};

struct NormsCall {
  int64_t filters;
  Shape shape;
  Filters weight;
  double* norms;  // [filters, rings]
  ParallelFor parallel_for;
};

struct ProxCall {
  int64_t filters;
  Shape shape;
  Filters weight, metric, out;
  // t and q of math.h, [filters, rings], or [rings] with a stride of 0. `squared` may be null.
  const double *thresholds, *squared;
  int64_t thresholds_stride;
  bool linf;
  ParallelFor parallel_for;
};

// T is the type weights are converted to for the computation, float or double.
template <typename T>
void norms_cpu(const NormsCall& call);
template <typename T>
void prox_cpu(const ProxCall& call);

}  // namespace loco::ring_prox
