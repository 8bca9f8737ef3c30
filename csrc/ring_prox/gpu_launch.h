// Parameters and sizes of launches of the ring kernels, from a call and its table.
#pragma once

#include "ring_prox/cuda.h"
#include "ring_prox/gpu_kernel.h"
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

// Launch configuration.
struct Size {
  unsigned blocks, threads;
  unsigned bytes;  // of dynamic shared memory
  bool staged;     // whether it can hold the filter

  template <typename T>
  static Size of(const CudaCall& call, bool in_metric) {
    const int64_t bytes = call.shape.numel() * static_cast<int64_t>(sizeof(T)) * (call.metric.data ? 2 : 1);
    const int64_t of_solver = solver_bytes(call.shape.rings, sizeof(T) == 8, in_metric);
    const bool staged = bytes + of_solver <= kMostStaged;
    return {static_cast<unsigned>(call.filters), threads_for(call.shape),
            static_cast<unsigned>(staged ? bytes + of_solver : of_solver), staged};
  }
};

}  // namespace loco::ring_prox
