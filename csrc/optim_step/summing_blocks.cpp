// Adam's update rule of math.h, fused with sums over each ring of the new weights, with the denominator d as the
// metric:
//   sums[k][ring] += x^2 / d^k, k = 0 .. 3
// The pointers' shapes and strides are given in blocks.h; sums are [count][kMaxRings], indexed by ring.
//
// A call runs on the calling thread, which takes kLanes elements at a time. The running sums stay in registers: if they
// were in memory, they would be reloaded before the weights that they wait for have arrived.
#include "optim_step/summing_blocks.h"

#include <algorithm>

#include "ring_prox/ring_sums.h"

namespace loco::optim_step {
LOCO_KERNELS_BEGIN

using namespace ring_prox::LOCO_CAPABILITY;
using ring_prox::kLanes;
using ring_prox::Moments;
using ring_prox::Run;

// How many elements ahead weights are prefetched: the hardware prefetcher is too late where weights take much work.
constexpr int64_t kAhead = 768;

LOCO_HD void fetch(const float* line) { __builtin_prefetch(line); }

// Updates kLanes elements from `begin` on and writes the squares of the new weights, divided by the k-th power of their
// denominators, to terms[k]. c: [kLanes].
template <Decay decay>
struct AdamUpdate {
  static constexpr int count = Moments::kPowers;
  const Block<float>& block;
  const AdamScalars<float>& scalars;

  LOCO_HD void fetch_from(int64_t begin) const {
    fetch(block.w + begin), fetch(block.g + begin), fetch(block.state[0] + begin), fetch(block.state[1] + begin);
  }

  LOCO_HD void operator()(int64_t begin, const float* c, float (&terms)[count][kLanes]) const {
    float *w = block.w + begin, *m = block.state[0] + begin, *v = block.state[1] + begin;
    float* const denominators = block.metric + begin;
    const float* g = block.g + begin;
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) {
      float x = w[l], first = m[l], second = v[l], none = 0;
      const float d = adam(x, g[l], first, second, none, c[l], AdamFlags{decay, false}, scalars);
      w[l] = x, m[l] = first, v[l] = second, denominators[l] = d;
      const float inverse = 1.0f / d;
      float term = x * x;
      terms[0][l] = term;
      for (int k = 1; k < count; ++k) terms[k][l] = term *= inverse;
    }
  }
};

// Updates a block and adds its sums. rings: how many rings the run has.
template <int rings, Decay decay>
LOCO_HD void stream(const Block<float>& block, const AdamScalars<float>& s, const Run& run,
                    double* const (&sums)[Moments::kPowers]) {
  const AdamUpdate<decay> update{block, s};
  RingSums<rings, Moments::kPowers> ring_sums;
  float same[kLanes];
  std::fill(same, same + kLanes, block.uniform);
  const float* const table = block.table ? block.table : same;
  const int64_t period = block.table ? block.period : kLanes;
  int64_t lane = 0, phase = block.phase;
  const auto step = [&](int64_t begin) LOCO_INLINE {
    float terms[Moments::kPowers][kLanes];
    update.fetch_from(begin + kAhead);
    update(begin, table + phase, terms);
    ring_sums.add(terms, run.ring_of_lane + lane);
    lane = lane + kLanes >= run.period ? 0 : lane + kLanes;
    phase = phase + kLanes == period ? 0 : phase + kLanes;
  };
  int64_t i = 0;
  for (; i + kShortSum * kLanes <= block.count; i += kShortSum * kLanes) {
    for (int k = 0; k < kShortSum; ++k) step(i + k * kLanes);
    ring_sums.settle();
  }
  for (; i < block.count; i += kLanes) {
    step(i);
    ring_sums.settle();
  }
  ring_sums.add_to(sums, run.ring);
}

template <Decay decay>
LOCO_HD void by_rings(const Block<float>& block, const AdamScalars<float>& s, const Run& run, Moments& moments) {
  double* const sums[Moments::kPowers] = {moments.power[0], moments.power[1], moments.power[2], moments.power[3]};
  if (run.uniform()) return stream<1, decay>(block, s, run, sums);
  run.rings == 2 ? stream<2, decay>(block, s, run, sums) : stream<3, decay>(block, s, run, sums);
}

static void update_and_sum(const Block<float>& block, AdamFlags flags, const AdamScalars<float>& scalars,
                           const Run& run, Moments& sums) {
  AdamScalars<float> local = scalars;
  local.lerp_from_end = false;
  if (flags.decay == Decay::none) return by_rings<Decay::none>(block, local, run, sums);
  if (flags.decay == Decay::l2) return by_rings<Decay::l2>(block, local, run, sums);
  by_rings<Decay::decoupled>(block, local, run, sums);
}

const SummingKernels summing_kernels = {update_and_sum};

LOCO_KERNELS_END
}  // namespace loco::optim_step
