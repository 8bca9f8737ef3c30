// Parameters and sizes of launches of the ring kernels, from a call and its table.
#pragma once

#include <type_traits>

#include "ring_prox/cuda.h"
#include "ring_prox/gpu_filter.h"
#include "ring_prox/gpu_models.h"
#include "ring_prox/gpu_solve.h"
#include "ring_prox/gpu_table.h"

namespace loco::ring_prox {

inline Parameters parameters_of(const CudaCall& call, const GpuTable& table, const unsigned char* memory) {
  const auto weights = [&](const Placed& placed) {
    const bool flat = placed.data && is_flat(placed, call.shape);
    return Weights{placed.data, placed.filter_stride, placed.channel_stride, placed.dtype, flat};
  };
  const auto doubles = [&](int64_t at) { return reinterpret_cast<const double*>(memory + at); };
  return {weights(call.weight),
          weights(call.metric),
          weights(call.out),
          reinterpret_cast<const Offsets*>(memory + table.offsets),
          {reinterpret_cast<const Tap*>(memory + table.taps), reinterpret_cast<const uint32_t*>(memory + table.begins),
           static_cast<uint32_t>(call.shape.channels), static_cast<uint32_t>(call.shape.taps), call.shape.rings,
           call.shape.channels_fastest},
          call.thresholds_on_device ? call.plain : doubles(table.plain),
          call.thresholds_on_device || !call.squared ? call.squared : doubles(table.squared),
          call.thresholds_stride};
}

struct Size {
  unsigned blocks, threads;
  unsigned bytes;  // of dynamic shared memory
  bool staged;     // whether it can hold the filter
};

inline Size size_of(const CudaCall& call) {
  const bool is_double = call.weight.dtype == DType::f64;
  const int64_t bytes = call.shape.numel() * (is_double ? 8 : 4) * (call.metric.data ? 2 : 1);
  const int64_t of_solver = solver_bytes(call.shape.rings, is_double, call.metric.data && !call.linf);
  const bool staged = bytes + of_solver <= kMostStaged;
  return {static_cast<unsigned>(call.filters), threads_for(call.shape),
          static_cast<unsigned>(staged ? bytes + of_solver : of_solver), staged};
}

// The template arguments of a kernel.
template <class S, typename Compute, bool in_shared>
struct Chosen {
  using Solver = S;
  using T = Compute;
  static constexpr bool staged = in_shared;
};

// Calls visit(Chosen) with the solver of the call's prox and the type it computes in.
template <class Visit>
void with_solver(const CudaCall& call, bool staged, const Visit& visit) {
  const auto typed = [&](auto zero, auto in_shared) {
    using T = decltype(zero);
    constexpr bool is_staged = decltype(in_shared)::value;
    if (call.linf) return visit(Chosen<Linf, T, is_staged>());
    call.metric.data ? visit(Chosen<MetricSolver<T>, T, is_staged>()) : visit(Chosen<L2, T, is_staged>());
  };
  const auto sized = [&](auto zero) { staged ? typed(zero, std::true_type()) : typed(zero, std::false_type()); };
  call.weight.dtype == DType::f64 ? sized(0.0) : sized(0.0f);
}

}  // namespace loco::ring_prox
