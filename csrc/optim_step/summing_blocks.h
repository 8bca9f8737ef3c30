// A variant of the inner loop of blocks.h that also computes the ring sums needed by a filter's prox, while the weights
// are in registers.
#pragma once

#include "optim_step/blocks.h"
#include "ring_prox/rows.h"

namespace loco::optim_step {

// Returns whether a run consists of whole vectors, and so do the patterns that repeat along it (rings and the table).
inline bool of_vectors(const Block<float>& block, const ring_prox::Run& run) {
  const bool lanes = run.uniform() || (run.period % ring_prox::kLanes == 0 && run.rings <= ring_prox::kMostRingSums);
  const bool table =
      block.table == nullptr || (block.period % ring_prox::kLanes == 0 && block.phase % ring_prox::kLanes == 0);
  return run.count % ring_prox::kLanes == 0 && block.count % ring_prox::kLanes == 0 && lanes && table;
}

// Returns whether update_and_sum supports the arguments: the flags must be common ones, and everything must consist of
// whole vectors.
inline bool sums_meanwhile(const Block<float>& block, AdamFlags flags, const AdamScalars<float>& scalars,
                           const ring_prox::Run& run) {
  return flags.decay != Decay::l1 && !flags.amsgrad && !scalars.lerp_from_end && of_vectors(block, run);
}

struct SummingKernels {
  // Update a block that is the whole run and add to the sums by ring what moments() adds at c = 0, in the metric of the
  // denominators.
  void (*update_and_sum)(const Block<float>& block, AdamFlags flags, const AdamScalars<float>& scalars,
                         const ring_prox::Run& run, ring_prox::Moments& sums);
};

LOCO_TABLE(SummingKernels, summing_kernels)

}  // namespace loco::optim_step
