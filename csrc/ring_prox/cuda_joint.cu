// The prox of penalties on the square of a sum over all filters of a layer, for several layers, on an NVIDIA GPU.
//
//   out = argmin_x 1/2 sum_i d_i (x_i - w_i)^2 + sum_(o,n) t_n ||x_o(G_n)|| + (sum_(o,n) q_n ||x_o(G_n)||)^2
//
// Operands are those of cuda.cu, for each layer. sums is [filters of all layers], scratch. searches is [layers], and
// meeting one; both are zero at the launch.
//
// x is the prox of each filter with thresholds t + f q, where f = 2 sum_(o,n) q_n ||x_o(G_n)|| of its layer. One launch
// finds the f of all layers: its blocks, which run at the same time, take one filter after another as the blocks of
// cuda.cu do, and meet after each round. The last block to come adds up the sums of each layer, one warp a layer, and
// chooses its next f. In the round after its f is found, a layer's filters are written, and left out from then on. No
// host waits for that.
//
// A launch takes layers of one solver, one arithmetic and one number of threads a filter, so that what a layer becomes
// does not depend on those beside it, and layers whose filters do not fit into shared memory one by one.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>
#include <type_traits>
#include <vector>

#include "common/launch.h"
#include "common/mistake.h"
#include "ring_prox/cuda.h"
#include "ring_prox/gpu_filter.h"
#include "ring_prox/gpu_launch.h"
#include "ring_prox/gpu_models.h"
#include "ring_prox/gpu_solve.h"
#include "ring_prox/gpu_table.h"

namespace loco::ring_prox {
namespace {

constexpr int kMostLayers = 24;  // of a launch

// Solves for a given factor, and keeps sum_n q_n ||x(G_n)|| there.
struct GivenFactor {
  double factor;
  double& sum;

  template <class Solve, class Penalty>
  LOCO_DEVICE void operator()(const Solve& solve, const Penalty& penalty, const double* found) const {
    solve(factor);
    sum = penalty(found);
  }
};

// Finds the root of f - 2 S(f), where S is the falling sum over a layer's filters. It lies in global memory, and all of
// its bytes are 0 before the first round.
class JointSearch {
 public:
  // The factor to take the next sum at, or the root once it is found.
  LOCO_DEVICE double factor() const { return factor_; }

  // Whether factor() is the root, and whether the round after that is over, too.
  LOCO_DEVICE bool is_found() const { return phase_ != kSearched; }
  LOCO_DEVICE bool is_over() const { return phase_ == kOver; }
  LOCO_DEVICE void end() { phase_ = kOver; }

  // Take the sum at factor(). precision: relative error of f at which to end. Return whether the root is found.
  LOCO_DEVICE bool take(double sum, double precision) {
    const bool found = find(sum, precision);
    phase_ = found ? kFound : kSearched;
    return found;
  }

 private:
  enum Phase { kSearched, kFound, kOver };

  LOCO_DEVICE bool find(double sum, double precision) {
    const double miss = factor_ - 2 * sum;
    if (rounds_++ == 0) {
      factor_ = -miss;
      return !(factor_ > 0);
    }
    if (std::fabs(miss) <= precision * factor_) return true;
    if (rounds_ == 2) {
      if (!(miss > 0)) return true;
      search_ = RootSearch(0, -factor_, factor_, miss);
    } else if (search_.take(miss, precision) || rounds_ > kMostTrials) {
      factor_ = search_.best();
      return true;
    }
    factor_ = search_.at();
    return false;
  }

  RootSearch search_;
  double factor_;
  int rounds_;
  Phase phase_;
};

// Wait until all blocks of the grid are here, the given number of times since `arrived` was 0, and one of them has
// called alone(), with all of its threads. is_last: in shared memory.
template <class Alone>
LOCO_DEVICE void meet_grid(unsigned* arrived, unsigned times, bool& is_last, const Alone& alone) {
  const unsigned all = times * (gridDim.x + 1);  // the last block arrives once more when it has called alone()
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(arrived, 1u) + 2 + (LOCO_MISTAKE(joint_meeting) && gridDim.x > 1) == all;
    __threadfence();
  }
  __syncthreads();
  if (is_last) {
    alone();
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    __threadfence();
    if (is_last) atomicAdd(arrived, 1u);
    while (atomicAdd(arrived, 0u) + LOCO_MISTAKE(joint_release) < all) continue;
    __threadfence();
  }
  __syncthreads();
}

struct Meeting {
  unsigned arrived;  // the count of meet_grid
  unsigned found;    // number of layers whose factor is found
};

struct Layers {
  Parameters of[kMostLayers];
  int64_t begins[kMostLayers + 1];  // the first filter of each layer, counted over all layers
  int count;
  double* sums;
  JointSearch* searches;
  Meeting* meeting;
};
static_assert(sizeof(Layers) <= 4096, "more parameters of a launch need CUDA 12.1");

template <typename T>
LOCO_DEVICE void take_sums(const Layers& layers) {
  constexpr double kPrecision = sizeof(T) == 8 ? 0x1p-52 : 0x1p-23;
  const unsigned lane = threadIdx.x % 32;
  for (int layer = threadIdx.x / 32; layer < layers.count; layer += blockDim.x / 32) {
    JointSearch& search = in_global(layers.searches)[layer];
    if (search.is_found()) {
      if (lane == 0) search.end();
      continue;
    }
    double total = 0;
    for (int64_t k = layers.begins[layer] + lane; k < layers.begins[layer + 1]; k += 32) {
      total += in_global(layers.sums)[k];
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) total += __shfl_xor_sync(0xffffffff, total, lanes);
    if (lane == 0 && search.take(total, kPrecision)) atomicAdd(&layers.meeting->found, 1u);
  }
}

template <class Solver, typename T, bool staged>
__global__ void __launch_bounds__(kMostThreads, 2) joint_prox(const __grid_constant__ Layers layers) {
  __shared__ Scratch scratch;
  __shared__ Solver solver;
  __shared__ bool is_last;
  LOCO_SHARED(memory);
  constexpr bool in_metric = std::is_same_v<Solver, MetricSolver<T>>;
#pragma unroll 1
  for (unsigned round = 1;; ++round) {
    const bool ends = in_global(layers.meeting)->found == static_cast<unsigned>(layers.count);
    int layer = 0;
#pragma unroll 1
    for (int64_t k = blockIdx.x; k < layers.begins[layers.count]; k += gridDim.x) {
      while (staged && k >= layers.begins[layer + 1] + LOCO_MISTAKE(joint_layer)) ++layer;
      const JointSearch& search = in_global(layers.searches)[layer];
      if (search.is_over()) continue;
      __syncthreads();  // the previous filter has been written
      const Parameters& p = layers.of[layer];
      const int rings = p.rings.count;
      const int64_t filter = k - layers.begins[layer];
      const BlockFilter<T, staged> weights(p, filter, memory + solver_bytes(rings, sizeof(T) == 8, in_metric));
      Sums<T, BlockFilter<T, staged>> of_filter(weights, rings, scratch, memory);
      double sum = 0;
      solver.solve(of_filter, p.thresholds(filter), GivenFactor{search.factor(), sum});
      if (search.is_found()) {
        weights.write([&](T u, T d, int ring) { return solver.shrunk(u, d, ring); });
      } else if (threadIdx.x == 0) {
        in_global(layers.sums)[k] = sum - sum == 0 ? sum : 0;  // filters of infinite weights and NaN do not count
      }
    }
    if (ends) return;
    meet_grid(&layers.meeting->arrived, round, is_last, [&] { take_sums<T>(layers); });
  }
}

// A kernel and its number of threads: whether weights are float64, whether norms are largest weights, whether they are
// in a metric otherwise, and whether filters fit into shared memory.
using Kind = std::tuple<bool, bool, bool, bool, unsigned>;

Kind kind_of(const CudaCall& call) {
  const Size size = size_of(call);
  return {call.weight.dtype == DType::f64, call.linf, call.metric.data && !call.linf, size.staged, size.threads};
}

}  // namespace

JointTable build_joint(const std::vector<CudaCall>& calls) {
  JointTable table{};
  int64_t filters = 0;
  for (const CudaCall& call : calls) {
    table.of_calls.push_back(build(call));
    const std::vector<unsigned char>& bytes = table.of_calls.back().bytes;
    table.begins.push_back(append(table.bytes, bytes.data(), static_cast<int64_t>(bytes.size())));
    filters += call.filters;
  }
  const auto count = static_cast<int64_t>(calls.size());
  const std::vector<unsigned char> zeros(count * sizeof(JointSearch));
  table.searches = append(table.bytes, zeros.data(), count * static_cast<int64_t>(sizeof(JointSearch)));
  const std::vector<Meeting> meetings(count, Meeting{LOCO_MISTAKE(joint_arrived), 0});
  table.meetings = append(table.bytes, meetings.data(), count);
  table.memory = static_cast<int64_t>(table.bytes.size()) + filters * static_cast<int64_t>(sizeof(double));
  return table;
}

void joint_prox_cuda(const std::vector<CudaCall>& calls, const JointTable& table, unsigned char* memory, void* stream) {
  std::map<Kind, std::vector<size_t>> kinds;
  for (size_t i = 0; i < calls.size(); ++i) kinds[kind_of(calls[i])].push_back(i);
  auto* sums = reinterpret_cast<double*>(memory + table.bytes.size());
  auto* searches = reinterpret_cast<JointSearch*>(memory + table.searches);
  auto* meeting = reinterpret_cast<Meeting*>(memory + table.meetings);
  for (const auto& [kind, members] : kinds) {
    const int most = std::get<3>(kind) ? kMostLayers : 1;
    for (size_t first = 0; first < members.size(); first += most) {
      Layers layers{};
      layers.sums = sums, layers.searches = searches, layers.meeting = meeting;
      Size size = size_of(calls[members[first]]);
      for (size_t n = first; n < members.size() && layers.count < most; ++n) {
        const size_t i = members[n];
        size.bytes = std::max(size.bytes, size_of(calls[i]).bytes);
        layers.of[layers.count++] = parameters_of(calls[i], table.of_calls[i], memory + table.begins[i]);
        layers.begins[layers.count] = layers.begins[layers.count - 1] + calls[i].filters;
      }
      const int64_t filters = layers.begins[layers.count];
      size.blocks = static_cast<unsigned>(std::min<int64_t>(filters, std::numeric_limits<int32_t>::max()));
      with_solver(calls[members[first]], size.staged, [&](auto chosen) {
        using C = decltype(chosen);
        LOCO_LAUNCH_TOGETHER((joint_prox<typename C::Solver, typename C::T, C::staged>), size.blocks, size.threads,
                             size.bytes, stream, layers);
      });
      sums += filters, searches += layers.count, ++meeting;
    }
  }
}

}  // namespace loco::ring_prox
