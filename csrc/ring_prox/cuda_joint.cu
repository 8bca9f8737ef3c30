// The prox of a penalty on the square of a sum over all filters of a layer, on an NVIDIA GPU.
//
//   out = argmin_x 1/2 sum_i d_i (x_i - w_i)^2 + sum_(o,n) t_n ||x_o(G_n)|| + (sum_(o,n) q_n ||x_o(G_n)||)^2
//
// Operands are those of cuda.cu. sums is [2, filters], scratch; arrived is 0 at the launch.
//
// x is the prox of each filter with thresholds t + f q, where f = 2 sum_(o,n) q_n ||x_o(G_n)||. One launch finds f: its
// blocks, which run at the same time, take one filter after another as the blocks of cuda.cu do, and meet after each
// round. Every block then adds up the sums of all filters in the same order, so that all take the same next step and
// end in the same round, which no host waits for.
#include <cmath>
#include <type_traits>

#include "common/launch.h"
#include "ring_prox/cuda.h"
#include "ring_prox/gpu_joint.h"
#include "ring_prox/gpu_kernel.h"
#include "ring_prox/gpu_launch.h"
#include "ring_prox/gpu_models.h"
#include "ring_prox/gpu_solve.h"

namespace loco::ring_prox {
namespace {

struct JointParameters {
  double* sums;
  unsigned* arrived;
  int64_t filters;
};

template <class Solver, typename T, bool staged>
__global__ void __launch_bounds__(kMostThreads, 2)
    joint_prox(const __grid_constant__ Parameters p, const __grid_constant__ JointParameters q) {
  __shared__ Scratch scratch;
  __shared__ Solver solver;
  __shared__ JointSearch search;
  __shared__ double factor;
  __shared__ bool found;
  LOCO_SHARED(memory);
  constexpr bool in_metric = std::is_same_v<Solver, MetricSolver<T>>;
  constexpr double kPrecision = sizeof(T) == 8 ? 0x1p-52 : 0x1p-23;
  const int rings = p.rings.count;
  unsigned char* const filter = memory + solver_bytes(rings, sizeof(T) == 8, in_metric);
  if (threadIdx.x == 0) {
    search.begin();
    factor = 0;
    found = false;
  }
  __syncthreads();
#pragma unroll 1
  for (unsigned round = 1;; ++round) {
    const bool last = found;
    double* const sums = q.sums + round % 2 * q.filters;  // some blocks may still read the sums of the round before
#pragma unroll 1
    for (int64_t k = blockIdx.x; k < q.filters; k += gridDim.x) {
      __syncthreads();  // the previous filter has been written
      const Kernel<T, staged> kernel(p, k, filter);
      Sums<T, Kernel<T, staged>> of_filter(kernel, rings, scratch, memory);
      double sum = 0;
      solver.solve(of_filter, p.thresholds(k), GivenFactor{factor, sum});
      if (last) {
        kernel.write([&](T u, T d, int ring) { return solver.shrunk(u, d, ring); });
      } else if (threadIdx.x == 0) {
        sums[k] = sum - sum == 0 ? sum : 0;  // filters of infinite weights and NaN do not count
      }
    }
    if (last) return;
    meet_grid(q.arrived, round);
    double total = 0;
    for (int64_t k = threadIdx.x; k < q.filters; k += blockDim.x) total += in_global(sums)[k];
    total = sum_of_block(total, scratch);
    if (threadIdx.x == 0) {
      found = search.take(total, kPrecision);
      factor = search.factor();
    }
    __syncthreads();
  }
}

template <typename T, bool staged>
void launch(const CudaCall& call, const Size& size, const Parameters& p, const JointParameters& q, void* stream) {
  if (call.linf) {
    LOCO_LAUNCH_TOGETHER((joint_prox<Linf, T, staged>), size.blocks, size.threads, size.bytes, stream, p, q);
  } else if (call.metric.data) {
    LOCO_LAUNCH_TOGETHER((joint_prox<MetricSolver<T>, T, staged>), size.blocks, size.threads, size.bytes, stream, p, q);
  } else {
    LOCO_LAUNCH_TOGETHER((joint_prox<L2, T, staged>), size.blocks, size.threads, size.bytes, stream, p, q);
  }
}

template <typename T>
void launch(const CudaCall& call, const Parameters& p, const JointParameters& q, void* stream) {
  const Size size = Size::of<T>(call, call.metric.data && !call.linf);
  size.staged ? launch<T, true>(call, size, p, q, stream) : launch<T, false>(call, size, p, q, stream);
}

}  // namespace

void joint_prox_cuda(const CudaCall& call, const GpuTable& table, unsigned char* memory, void* stream) {
  const Parameters p = parameters_of(call, table, memory);
  const JointParameters q{reinterpret_cast<double*>(memory + table.bytes.size()),
                          reinterpret_cast<unsigned*>(memory + table.arrived), call.filters};
  if (call.weight.dtype == DType::f64) return launch<double>(call, p, q, stream);
  launch<float>(call, p, q, stream);
}

}  // namespace loco::ring_prox
