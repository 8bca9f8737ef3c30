// The step of parameters with a penalty: the update w, state <- rule(w, g, state) of math.h, followed by the prox of
// ring_prox/math.h for each filter.
//
// p and q: the launch's parameters; gpu_task.h and gpu_prox.h give the shapes of their arrays, which are contiguous and
// in global memory. w, g and states have the layouts of cuda.cu; a filter is numel consecutive elements in the
// parameter's memory order, from k * numel on for filter k. In shared memory or in a slot it takes weights [numel] and,
// if the rule has a metric, metrics [numel], both in ring order (ring_prox/gpu_table.h).
//
// One block steps one filter; blocks with slots take one filter after another.
// 1. It updates the weights as cuda.cu does, but keeps them in shared memory, in the compute dtype and in ring order,
//    and with them their metrics if the rule has any. A filter that is too large for that goes to a slot in global
//    memory.
// 2. It solves for the scalars of the prox (ring_prox/gpu_solve.h).
// 3. It writes every weight, rounded once, in memory order.
// Filters of all entries for which the same number of threads is suitable share a launch.
#include <algorithm>
#include <type_traits>

#include "common/launch.h"
#include "common/mistake.h"
#include "optim_step/gpu_prox.h"

namespace loco::optim_step {
namespace {

constexpr int64_t kSlots = 304;  // least number of blocks that the largest GPUs hold at a time

// Steps the launch's filters. on_chip: they fit in shared memory.
template <class Rule, typename T, bool on_chip>
__global__ void __launch_bounds__(kMostThreads, kProxBlocks)
    step_filters(const __grid_constant__ Parameters<Rule> p, const __grid_constant__ ProxParameters q) {
  __shared__ ring_prox::Scratch scratch;
  __shared__ std::conditional_t<Rule::has_metric, ring_prox::MetricSolver<T>, ring_prox::L2> solver;
  __shared__ double plain[kMaxRings], squared[kMaxRings];
  __shared__ T coefficients[kCachedWithProx];
  LOCO_SHARED(memory);
  if (!LOCO_MISTAKE(step_prox_found_inf) && is_set(p.found_inf)) return;
  for (uint32_t k = blockIdx.x; k < q.filters; k += gridDim.x) {  // a launch has fewer than 2^31 filters
    const Chunk* const chunks = p.chunks + q.first_chunk;
    const Chunk chunk = chunks[q.find(chunks, k)];
    const auto prox_of = [&]() -> const Prox& { return q.proxes[p.entries[chunk.entry].prox]; };
    const auto begin_of = [&](const Rings& rings) {
      const int64_t of_entry = k - (LOCO_MISTAKE(step_prox_filter) ? 0 : chunk.index);
      return of_entry * rings.numel();
    };
    const auto ordered = [&](const Rings& rings) {
      unsigned char* const filter = memory + ring_prox::solver_bytes(rings.count, sizeof(T) == 8, Rule::has_metric);
      T* const weights = reinterpret_cast<T*>(on_chip ? filter : q.slots + blockIdx.x * q.slot_bytes);
      return Ordered<T, on_chip>{rings, weights, Rule::has_metric ? weights + rings.numel() : nullptr};
    };
    __syncthreads();  // all threads have written the previous filter
    {
      // The update has its own rings and task, so that values that it alone reads take no registers during the solve.
      const Rings rings = q.rings(prox_of());
      update_filter(Task<Rule, T>(p, chunk.entry, begin_of(rings)), ordered(rings), coefficients);
    }
    const Prox& prox = prox_of();
    const Rings rings = q.rings(prox);
    const Task<Rule, T> task(p, chunk.entry, begin_of(rings));
    const Ordered<T, on_chip> weights = ordered(rings);
    const ring_prox::Thresholds thresholds = scaled_thresholds(q, prox, task, plain, squared);
    if (!LOCO_MISTAKE(step_prox_barrier)) __syncthreads();
    ring_prox::Sums<T, Ordered<T, on_chip>> sums(weights, rings.count, scratch, memory);
    solver.solve(sums, thresholds, ring_prox::OwnFactor{thresholds});
    write_filter(task, rings, [&](const Walk& walk) {
      const uint32_t i = walk.place();
      return solver.shrunk(weights.weight(i), weights.metric(i), walk.ring());
    });
  }
}

// Returns how many blocks a launch has.
int64_t blocks_of(const ProxWork& work) { return work.on_chip ? work.filters : std::min(work.filters, kSlots); }

template <class Rule, typename T>
void launch(const Parameters<Rule>& p, const ProxParameters& q, const ProxWork& work, void* stream) {
  const auto blocks = static_cast<unsigned>(blocks_of(work));
  const auto bytes = static_cast<unsigned>(work.on_chip ? work.bytes : work.solver_bytes);
  if (work.on_chip) {
    LOCO_LAUNCH_SHARED((step_filters<Rule, T, true>), blocks, work.threads, bytes, stream, p, q);
  } else {
    LOCO_LAUNCH_SHARED((step_filters<Rule, T, false>), blocks, work.threads, bytes, stream, p, q);
  }
}

}  // namespace

int64_t prox_bytes(const GpuTable& table) {
  int64_t bytes = 0;
  for (const ProxWork& work : table.prox_works) {
    if (!work.on_chip) bytes = std::max(bytes, blocks_of(work) * work.bytes);
  }
  return bytes;
}

template <class Rule>
void step_with_prox(const CudaCall& call, const Parameters<Rule>& p, unsigned char* memory) {
  const GpuTable& t = *call.table;
  ProxParameters q{};
  q.proxes = reinterpret_cast<const Prox*>(call.memory + t.proxes);
  q.taps = reinterpret_cast<const ring_prox::Tap*>(call.memory + t.taps);
  q.begins = reinterpret_cast<const uint32_t*>(call.memory + t.begins);
  q.thresholds = reinterpret_cast<const double*>(call.memory + t.thresholds);
  q.slots = memory;
  for (const ProxWork& work : t.prox_works) {
    q.first_chunk = work.first, q.chunks = work.count, q.filters = work.filters, q.slot_bytes = work.bytes;
    work.is_double ? launch<Rule, double>(p, q, work, call.stream) : launch<Rule, float>(p, q, work, call.stream);
  }
}

template void step_with_prox<Sgd>(const CudaCall&, const Parameters<Sgd>&, unsigned char*);
template void step_with_prox<Adam>(const CudaCall&, const Parameters<Adam>&, unsigned char*);

}  // namespace loco::optim_step
