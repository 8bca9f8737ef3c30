// The prox of nested groups on the CPU, without torch: plain structs in, one kernel (output channel) after the other.
#pragma once

#include <cstdint>

#include "common/operand.h"
#include "common/parallel.h"
#include "ring_prox/kernel.h"

namespace loco::ring_prox {

// The weights of all kernels: those of kernel o are `operand` moved by o times the stride, its nest one kernel's.
struct Kernels {
  Operand operand;  // data null: absent
  int64_t stride;   // in elements
};

struct NormsCall {
  int64_t kernels;
  Shape shape;
  Kernels weight;
  double* norms;  // [kernels, rings]
  ParallelFor parallel_for;
};

struct ProxCall {
  int64_t kernels;
  Shape shape;
  Kernels weight, metric, out;
  const double *thresholds, *squared;  // t and q of math.h, [kernels, rings], or [rings] with a stride of 0; q or null
  int64_t thresholds_stride;
  bool linf;
  ParallelFor parallel_for;
};

// T: the type that weights are held in meanwhile, float or double.
template <typename T>
void norms_cpu(const NormsCall& call);
template <typename T>
void prox_cpu(const ProxCall& call);

}  // namespace loco::ring_prox
