// The step of parameters with a coupled penalty (ring_prox/penalty.h): all filters of a layer are shrunk together.
//
// Each filter becomes x = prox of its updated weights (ring_prox/math.h) with thresholds t + f q. The layer's filters
// share the factor f, the root of f = 2 sum_filters sum_n q_n ||x(G_n)||.
//
// p and q: the launch's parameters; gpu_task.h and gpu_prox.h give the shapes of their arrays, which are contiguous and
// in global memory. Of q, searches is [chunks], shares is [kernels], and held has one HeldKernel per filter:
// weights [numel], metrics [numel] if the rule has any, squares [rings + 1]. w, g and states lie as in cuda.cu.
//
// 1. One block per filter updates its weights as in cuda_prox.cu, and leaves them in global memory.
// 2. The shared factor is searched for in rounds. One block per filter computes the filter's contribution to the sum of
//    its layer for the factor being tried; then one block per layer adds up the contributions and chooses the next
//    factor. The host does not synchronize to see whether a factor has been found: it always launches kRounds rounds,
//    and those after the last one needed return immediately.
// 3. One block per filter shrinks its weights and writes them, rounded once.
#include <limits>

#include "common/launch.h"
#include "common/mistake.h"
#include "optim_step/cuda_coupled.h"

namespace loco::optim_step {
namespace {

using ring_prox::kInfinity;
using ring_prox::Scratch;
using ring_prox::Sums;

constexpr int kRounds = 64;  // most rounds of a search, which usually takes about ten

// The filter that a block works on.
template <class Rule, typename T>
struct BlockKernel {
  int64_t layer;
  Chunk chunk;
  const Prox& prox;
  Rings rings;
  Task<Rule, T> task;
  HeldKernel<Rule, T> held;

  LOCO_DEVICE BlockKernel(const Parameters<Rule>& p, const ProxParameters& q)
      : layer(q.find(p.chunks + q.first_chunk, blockIdx.x)),
        chunk(p.chunks[q.first_chunk + layer]),
        prox(q.proxes[p.entries[chunk.entry].prox]),
        rings(q.rings(prox)),
        task(p, chunk.entry, (blockIdx.x - chunk.index) * int64_t{rings.numel()}),
        held(q, task.entry, rings, blockIdx.x - chunk.index) {}
};

// Updates the weights of each filter and resets the searches.
template <class Rule, typename T>
__global__ void __launch_bounds__(kMostThreads, kProxBlocks)
    update_kernels(const __grid_constant__ Parameters<Rule> p, const __grid_constant__ ProxParameters q) {
  __shared__ T coefficients[kCoefficients];
  if (is_set(p.found_inf) && !LOCO_MISTAKE(step_layer_found_inf)) return;
  const BlockKernel<Rule, T> block(p, q);
  update_kernel(block.task, block.held.ordered(block.rings), coefficients);
  if (int64_t{blockIdx.x} == block.chunk.index && threadIdx.x == 0) q.searches[block.layer] = Search{{}, false};
}

// Caches the sums of squares over a filter's rings, which are computed in the first round. memory: [rings + 1], the
// sums and their scale. known: whether they are in memory already.
template <class Sums>
struct Remembering {
  Sums& sums;
  double* memory;
  bool known;

  LOCO_DEVICE int rings() const { return sums.rings(); }

  LOCO_DEVICE double scaled_squares(double* const (&to)[1]) {
    const int count = rings();
    const double scale = known ? memory[count] : sums.scaled_squares(to);
    const double* const from = known ? memory : to[0];
    double* const copy = known ? to[0] : memory;
    for (int r = 0; threadIdx.x == 0 && r < count; ++r) copy[r] = from[r];
    if (threadIdx.x == 0 && !known) memory[count] = scale;
    __syncthreads();
    return scale;
  }
};

// Writes each filter's contribution to its layer's sum for the factor being tried. A filter without a finite norm
// contributes 0.
template <class Rule, typename T>
__global__ void __launch_bounds__(kMostThreads, kProxBlocks)
    weigh_kernels(const __grid_constant__ Parameters<Rule> p, const __grid_constant__ ProxParameters q) {
  __shared__ Scratch scratch;
  __shared__ ring_prox::AnySolver<Rule::has_metric> solver;
  __shared__ double plain[kMaxRings], squared[kMaxRings];
  if (is_set(p.found_inf)) return;
  const BlockKernel<Rule, T> block(p, q);
  const Search& search = q.searches[block.layer];
  if (search.found) return;
  const ring_prox::Thresholds thresholds = scaled_thresholds(q, block.prox, block.task, plain, squared);
  __syncthreads();
  const Ordered<T, false> kernel = block.held.ordered(block.rings);
  Sums<T, Ordered<T, false>> sums(kernel, block.rings.count, scratch);
  const double factor = search.factor.at();
  double share;
  if (!Rule::has_metric && !block.prox.linf) {
    if constexpr (!Rule::has_metric) {
      Remembering<decltype(sums)> remembering{sums, block.held.squares, search.factor.begun()};
      share = penalty_at(factor, solver.l2, remembering, thresholds);
    }
  } else {
    share = solver.penalty_at(factor, block.prox.linf, sums, thresholds);
  }
  if (threadIdx.x == 0) q.shares[blockIdx.x] = share < kInfinity ? share : 0;
}

struct Nothing {};

// Adds up the contributions of each layer's filters and advances its search. One block handles one layer. tolerance:
// the factor's relative tolerance.
__global__ void __launch_bounds__(kMostThreads)
    search_factors(const __grid_constant__ ProxParameters q, const Chunk* chunks, DeviceScalar found_inf,
                   double tolerance) {
  __shared__ Scratch scratch;
  Search& search = q.searches[blockIdx.x];
  if (is_set(found_inf) || search.found) return;
  const int64_t end = blockIdx.x + 1 < q.chunks ? chunks[blockIdx.x + 1].index : q.kernels;
  double sum[1] = {0};
  const int64_t first = LOCO_MISTAKE(step_layer_sum) ? 0 : chunks[blockIdx.x].index;
  for (int64_t k = first + threadIdx.x; k < end; k += blockDim.x) sum[0] += q.shares[k];
  const Nothing nothing;
  Sums<double, Nothing>(nothing, 0, scratch).reduce(sum, ring_prox::Add());
  if (threadIdx.x == 0) search.found = search.factor.take(sum[0], tolerance);
}

// Shrinks each filter by its layer's factor and writes its weights.
template <class Rule, typename T>
__global__ void __launch_bounds__(kMostThreads, kProxBlocks)
    shrink_kernels(const __grid_constant__ Parameters<Rule> p, const __grid_constant__ ProxParameters q) {
  __shared__ Scratch scratch;
  __shared__ ring_prox::AnySolver<Rule::has_metric> solver;
  __shared__ double plain[kMaxRings], squared[kMaxRings], merged[kMaxRings];
  if (is_set(p.found_inf)) return;
  const BlockKernel<Rule, T> block(p, q);
  const bool linf = block.prox.linf;
  const ring_prox::Thresholds thresholds = scaled_thresholds(q, block.prox, block.task, plain, squared);
  __syncthreads();
  const double factor = q.searches[LOCO_MISTAKE(step_layer_factor) ? 0 : block.layer].factor.best();
  if (threadIdx.x == 0) ring_prox::merge(thresholds, block.rings.count, factor, 1, merged);
  __syncthreads();
  const Ordered<T, false> kernel = block.held.ordered(block.rings);
  Sums<T, Ordered<T, false>> sums(kernel, block.rings.count, scratch);
  solver.solve(linf, sums, {merged, nullptr});
  write_kernel(block.task, block.rings, [&](const Walk& walk) {
    const uint32_t i = walk.place();
    return solver.shrunk(linf, kernel.weight(i), kernel.metric(i), walk.ring());
  });
}

template <class Rule, typename T>
void launch(const Parameters<Rule>& p, const ProxParameters& q, const ProxWork& work, void* stream) {
  const auto layers = static_cast<unsigned>(work.count), kernels = static_cast<unsigned>(work.kernels);
  LOCO_LAUNCH((update_kernels<Rule, T>), kernels, work.threads, stream, p, q);
  for (int i = 0; i < kRounds; ++i) {
    LOCO_LAUNCH((weigh_kernels<Rule, T>), kernels, work.threads, stream, p, q);
    LOCO_LAUNCH(search_factors, layers, kMostThreads, stream, q, p.chunks + q.first_chunk, p.found_inf,
                std::numeric_limits<T>::epsilon());
  }
  LOCO_LAUNCH((shrink_kernels<Rule, T>), kernels, work.threads, stream, p, q);
}

}  // namespace

template <class Rule>
void step_together(const Parameters<Rule>& p, const ProxParameters& q, const ProxWork& work, void* stream) {
  work.is_double ? launch<Rule, double>(p, q, work, stream) : launch<Rule, float>(p, q, work, stream);
}

template void step_together<Sgd>(const Parameters<Sgd>&, const ProxParameters&, const ProxWork&, void*);
template void step_together<Adam>(const Parameters<Adam>&, const ProxParameters&, const ProxWork&, void*);

}  // namespace loco::optim_step
