// One block works on one kernel (output channel), in ring order (gpu_table.h).
//
// 1. It brings the weights into shared memory, 16 bytes at a time where they lie flat. A kernel too large for that is
//    read from global memory whenever its weights are needed.
// 2. It solves for the scalars of math.h. All threads go the same way there: a sum over weights is that of the whole
//    block, in float64, in an order that the shape alone decides, and every thread gets it. Arrays of scalars lie in
//    shared memory, and thread 0 alone writes to them.
// 3. It writes every weight once, in the order of memory.
#include <cmath>

#include "common/launch.h"
#include "ring_prox/cuda.h"
#include "ring_prox/gpu_kernel.h"
#include "ring_prox/gpu_table.h"

namespace loco::ring_prox {
namespace {

constexpr int kBlocks = 2;                 // on a multiprocessor, at least; more would leave too few registers
constexpr int kShare = 32;                 // weights; a block has the fewest warps whose threads have no more
constexpr int64_t kMostStaged = 40 << 10;  // bytes

// An array for thread 0; what other threads do with theirs goes nowhere.
struct OfLeader {
  struct Element {
    double* at;
    LOCO_DEVICE operator double() const { return at ? *at : 0; }
    LOCO_DEVICE void operator=(double value) const {
      if (at) *at = value;
    }
  };

  double* values;
  LOCO_DEVICE Element operator[](int i) const { return {threadIdx.x == 0 ? values + i : nullptr}; }
};

template <typename T, bool staged>
__global__ void __launch_bounds__(kMostThreads, kBlocks) norms(const __grid_constant__ Parameters p, T* out) {
  __shared__ Scratch scratch;
  __shared__ double squares[kMaxRings];
  LOCO_SHARED(memory);
  Kernel<T, staged> kernel(p, memory, scratch);
  const double scale = kernel.scaled_squares({squares});
  for (int r = threadIdx.x; r < p.rings; r += blockDim.x) {
    out[int64_t{blockIdx.x} * p.rings + r] = static_cast<T>(std::sqrt(squares[r]) / scale);
  }
}

template <typename T, bool staged>
__global__ void __launch_bounds__(kMostThreads, kBlocks) prox_l2(const __grid_constant__ Parameters p) {
  __shared__ Scratch scratch;
  __shared__ double squares[kMaxRings], t[kMaxRings], factors[kMaxRings];
  LOCO_SHARED(memory);
  Kernel<T, staged> kernel(p, memory, scratch);
  const double scale = kernel.scaled_squares({squares});
  if (threadIdx.x == 0) {
    const Thresholds thresholds = p.thresholds();
    const auto solve = [&](double factor) {
      merge(thresholds, p.rings, factor, scale, t);
      chain(squares, t, p.rings, factors);
    };
    const auto penalty = [&](const double* of) { return l2_penalty(squares, of, thresholds.squared, p.rings) / scale; };
    solve_squared(thresholds, solve, penalty, factors);
  }
  __syncthreads();
  kernel.write([&](T u, T, int r) { return u * static_cast<T>(factors[r]); });
}

// What solve_metric asks of a kernel.
template <typename T, bool staged>
struct MetricSums {
  Kernel<T, staged>& kernel;

  LOCO_DEVICE double tolerance() const { return 1e-9; }

  LOCO_DEVICE Damped operator()(int ring, double c) {
    double sums[2] = {0, 0};
    kernel.for_ring(ring, [&](T u, T d) {
      const double value = damped(kernel.scaled(u), d, c);
      sums[0] += value * value;
      sums[1] += value * value / (static_cast<double>(d) + c);
    });
    kernel.reduce(sums, Add());
    return {sums[0], sums[1]};
  }
};

template <typename T, bool staged>
__global__ void __launch_bounds__(kMostThreads, kBlocks) prox_metric(const __grid_constant__ Parameters p) {
  __shared__ Scratch scratch;
  __shared__ double squares[kMaxRings], weighed[kMaxRings], norms[kMaxRings], t[kMaxRings], factors[kMaxRings],
      coefficients[kMaxRings], derivatives[kMaxRings];
  __shared__ int found;
  LOCO_SHARED(memory);
  Kernel<T, staged> kernel(p, memory, scratch);
  const double scale = kernel.scaled_squares({squares, weighed});
  const Thresholds thresholds = p.thresholds();
  MetricSums<T, staged> sums{kernel};
  if (threadIdx.x == 0) {
    double sum = 0;
    for (int r = 0; r < p.rings; ++r) norms[r] = std::sqrt(sum += squares[r]);
  }
  int first = 0;
  const auto solve = [&](double factor) {
    if (threadIdx.x == 0) {
      merge(thresholds, p.rings, factor, scale, t);
      found = chain(weighed, t, p.rings, factors);
    }
    __syncthreads();
    first = found;
    solve_metric(sums, norms, t, first, p.rings, OfLeader{coefficients}, OfLeader{derivatives});
    __syncthreads();
  };
  const auto penalty = [&](const double* of) {
    return (of ? metric_penalty(sums, of, thresholds.squared, first, p.rings)
               : l2_penalty(squares, nullptr, thresholds.squared, p.rings)) /
           scale;
  };
  solve_squared(thresholds, solve, penalty, coefficients);
  kernel.write([&](T u, T d, int r) {
    const bool alone = r < first || coefficients[r] == 0;
    return alone ? u * static_cast<T>(r >= first) : static_cast<T>(damped(u, d, coefficients[r]));
  });
}

template <typename T, bool staged>
__global__ void __launch_bounds__(kMostThreads, kBlocks) prox_linf(const __grid_constant__ Parameters p) {
  __shared__ Scratch scratch;
  __shared__ double sizes[kMaxRings], t[kMaxRings], caps[kMaxRings];
  LOCO_SHARED(memory);
  Kernel<T, staged> kernel(p, memory, scratch);
  const Thresholds thresholds = p.thresholds();
  const auto above = [&](int n, OfLeader, double level) {
    __syncthreads();  // caps have been written
    double sums[3] = {0, 0, 0};
    for (int r = 0; r <= n; ++r) {
      const double cap = r == n ? kInfinity : caps[r];
      kernel.for_ring(r, [&](T u, T d) {
        const double size = std::fabs(static_cast<double>(u)), clipped = size > cap ? cap : size;
        if (clipped <= level) return;
        sums[0] += static_cast<double>(d) * clipped;
        sums[1] += static_cast<double>(d);
        sums[2] += 1;
      });
    }
    kernel.reduce(sums, Add());
    return Above{sums[0], sums[1], sums[2]};
  };
  const auto solve = [&](double factor) {
    if (threadIdx.x == 0) merge(thresholds, p.rings, factor, 1, t);
    __syncthreads();
    solve_linf(above, t, p.rings, OfLeader{caps});
    __syncthreads();
  };
  for (int r = 0; thresholds.squared && r < p.rings; ++r) {
    const double size = kernel.largest(r, r + 1);
    if (threadIdx.x == 0) sizes[r] = size;
  }
  __syncthreads();
  const auto penalty = [&](const double* of) { return linf_penalty(sizes, of, thresholds.squared, p.rings); };
  solve_squared(thresholds, solve, penalty, caps);
  kernel.write([&](T u, T, int r) {
    const T size = std::fabs(u), cap = static_cast<T>(caps[r]);
    return std::copysign(size > cap || cap != cap ? cap : size, u);
  });
}

Parameters parameters_of(const CudaCall& call, const GpuTable& table, const unsigned char* memory) {
  const auto weights = [&](const Placed& placed) {
    const bool flat = placed.data && is_flat(placed, call.shape);
    return Weights{placed.data, placed.kernel_stride, placed.channel_stride, placed.dtype, flat};
  };
  const auto doubles = [&](int64_t at) { return reinterpret_cast<const double*>(memory + at); };
  return {weights(call.weight),
          weights(call.metric),
          weights(call.out),
          reinterpret_cast<const Tap*>(memory + table.taps),
          reinterpret_cast<const uint32_t*>(memory + table.begins),
          doubles(table.plain),
          call.squared ? doubles(table.squared) : nullptr,
          call.thresholds_stride,
          static_cast<uint32_t>(call.shape.channels),
          static_cast<uint32_t>(call.shape.taps),
          call.shape.rings,
          call.shape.channels_fastest};
}

// Of a launch.
struct Size {
  unsigned blocks, threads;
  unsigned staged;  // bytes; 0: too many

  template <typename T>
  static Size of(const CudaCall& call) {
    const int64_t bytes = call.shape.numel() * static_cast<int64_t>(sizeof(T)) * (call.metric.data ? 2 : 1);
    unsigned threads = 32;
    while (threads < kMostThreads && threads * kShare < call.shape.numel()) threads *= 2;
    return {static_cast<unsigned>(call.kernels), threads, bytes <= kMostStaged ? static_cast<unsigned>(bytes) : 0};
  }
};

template <typename T, bool staged>
void launch_prox(const CudaCall& call, const Size& size, const Parameters& p, void* stream) {
  if (call.linf) {
    LOCO_LAUNCH_SHARED((prox_linf<T, staged>), size.blocks, size.threads, size.staged, stream, p);
  } else if (call.metric.data) {
    LOCO_LAUNCH_SHARED((prox_metric<T, staged>), size.blocks, size.threads, size.staged, stream, p);
  } else {
    LOCO_LAUNCH_SHARED((prox_l2<T, staged>), size.blocks, size.threads, size.staged, stream, p);
  }
}

template <typename T>
void launch_prox(const CudaCall& call, const Parameters& p, void* stream) {
  const Size size = Size::of<T>(call);
  size.staged ? launch_prox<T, true>(call, size, p, stream) : launch_prox<T, false>(call, size, p, stream);
}

template <typename T>
void launch_norms(const CudaCall& call, const Parameters& p, T* out, void* stream) {
  const Size size = Size::of<T>(call);
  if (size.staged) {
    LOCO_LAUNCH_SHARED((norms<T, true>), size.blocks, size.threads, size.staged, stream, p, out);
  } else {
    LOCO_LAUNCH_SHARED((norms<T, false>), size.blocks, size.threads, 0, stream, p, out);
  }
}

}  // namespace

void norms_cuda(const CudaCall& call, const GpuTable& table, const unsigned char* memory, void* norms, void* stream) {
  const Parameters p = parameters_of(call, table, memory);
  if (call.weight.dtype == DType::f64) return launch_norms(call, p, static_cast<double*>(norms), stream);
  launch_norms(call, p, static_cast<float*>(norms), stream);
}

void prox_cuda(const CudaCall& call, const GpuTable& table, const unsigned char* memory, void* stream) {
  const Parameters p = parameters_of(call, table, memory);
  if (call.weight.dtype == DType::f64) return launch_prox<double>(call, p, stream);
  launch_prox<float>(call, p, stream);
}

}  // namespace loco::ring_prox
