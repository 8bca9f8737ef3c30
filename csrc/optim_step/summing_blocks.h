// Variants of the inner loops of blocks.h that also compute the ring sums needed by a filter's prox, while the weights
// are in registers.
#pragma once

#include "optim_step/blocks.h"
#include "ring_prox/rows.h"

namespace loco::optim_step {

// Returns whether update_and_sum supports the arguments: the flags must be common ones, and everything must consist of
// whole vectors.
bool sums_meanwhile(const Block<float>& block, SgdFlags flags, const SgdScalars<float>& scalars,
                    const ring_prox::Run& run);
bool sums_meanwhile(const Block<float>& block, AdamFlags flags, const AdamScalars<float>& scalars,
                    const ring_prox::Run& run);

// Updates a block that is the whole run and adds to the sums by ring: what squares() adds, or for Adam what moments()
// adds at c = 0, in the metric of the denominators.
void update_and_sum(const Block<float>& block, SgdFlags flags, const SgdScalars<float>& scalars,
                    const ring_prox::Run& run, ring_prox::Moments& sums);
void update_and_sum(const Block<float>& block, AdamFlags flags, const AdamScalars<float>& scalars,
                    const ring_prox::Run& run, ring_prox::Moments& sums);

}  // namespace loco::optim_step
