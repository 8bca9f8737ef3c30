// The prox of math.h and the ring norms on an NVIDIA GPU.
//
//   norms[o, r] = ||w(o, ring r)||_2
//   out[o] = argmin_x 1/2 sum_i d_i (x_i - w_i)^2 + sum_n t_n ||x(G_n)|| + (sum_n q_n ||x(G_n)||)^2
//
// weight, metric and out are [filters, channels, taps] with strides in elements (struct Weights; tap offsets come from
// the table). norms is contiguous [filters, rings]. plain (t) and squared (q) are float64 [filters, rings] with row
// stride thresholds_stride, 0 if all filters share one row.
//
// One block works on one filter (one output channel's weights), in ring order (gpu_table.h); blockIdx.x is the filter.
//
// 1. The block loads the weights into shared memory, 16 bytes at a time if they are contiguous. A filter too large for
//    shared memory is read from global memory whenever its weights are needed.
// 2. Each thread sums over its share of the weights. Warps reduce by shuffles and meet in shared memory, and thread 0
//    solves for the scalars of math.h (gpu_solve.h).
// 3. Every weight is written once, in memory order.
#include <cmath>
#include <type_traits>

#include "common/launch.h"
#include "ring_prox/cuda.h"
#include "ring_prox/gpu_filter.h"
#include "ring_prox/gpu_launch.h"
#include "ring_prox/gpu_models.h"
#include "ring_prox/gpu_solve.h"
#include "ring_prox/gpu_table.h"

namespace loco::ring_prox {
namespace {

constexpr int kBlocks = 2;  // blocks per multiprocessor, at least; more would leave too few registers

template <typename T, bool staged>
__global__ void __launch_bounds__(kMostThreads, kBlocks) norms(const __grid_constant__ Parameters p, T* out) {
  __shared__ Scratch scratch;
  __shared__ double squares[kMaxRings];
  LOCO_SHARED(memory);
  const BlockFilter<T, staged> weights(p, blockIdx.x, memory);
  const int rings = p.rings.count;
  Sums<T, BlockFilter<T, staged>> sums(weights, rings, scratch, memory);
  const double scale = sums.scaled_squares({squares});
  for (int r = threadIdx.x; r < rings; r += blockDim.x) {
    out[int64_t{blockIdx.x} * rings + r] = static_cast<T>(std::sqrt(squares[r]) / scale);
  }
}

template <class Solver, typename T, bool staged>
__global__ void __launch_bounds__(kMostThreads, kBlocks) prox(const __grid_constant__ Parameters p) {
  __shared__ Scratch scratch;
  __shared__ Solver solver;
  LOCO_SHARED(memory);
  constexpr bool in_metric = std::is_same_v<Solver, MetricSolver<T>>;
  const BlockFilter<T, staged> weights(p, blockIdx.x, memory + solver_bytes(p.rings.count, sizeof(T) == 8, in_metric));
  Sums<T, BlockFilter<T, staged>> sums(weights, p.rings.count, scratch, memory);
  const Thresholds thresholds = p.thresholds(blockIdx.x);
  solver.solve(sums, thresholds, OwnFactor{thresholds});
  weights.write([&](T u, T d, int ring) { return solver.shrunk(u, d, ring); });
}

template <typename T>
void launch_norms(const CudaCall& call, const Parameters& p, T* out, void* stream) {
  const Size size = size_of(call);
  if (size.staged) {
    LOCO_LAUNCH_SHARED((norms<T, true>), size.blocks, size.threads, size.bytes, stream, p, out);
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
  const Size size = size_of(call);
  with_solver(call, size.staged, [&](auto chosen) {
    using C = decltype(chosen);
    LOCO_LAUNCH_SHARED((prox<typename C::Solver, typename C::T, C::staged>), size.blocks, size.threads, size.bytes,
                       stream, p);
  });
}

}  // namespace loco::ring_prox
