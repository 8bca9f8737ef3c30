// The inner loops of blocks.h that also sum up what the prox of a kernel asks of its rings, while the weights are in
// registers.
#pragma once

#include "optim_step/blocks.h"
#include "ring_prox/rows.h"

namespace loco::optim_step {

// Whether update_and_sum can be called: for common flags, and where all is made up of whole vectors.
bool sums_meanwhile(const Block<float>& block, SgdFlags flags, const SgdScalars<float>& scalars,
                    const ring_prox::Run& run);
bool sums_meanwhile(const Block<float>& block, AdamFlags flags, const AdamScalars<float>& scalars,
                    const ring_prox::Run& run);

// Updates a block that is the whole run and adds to the sums by ring: those of squares(), or of moments() at c = 0, in
// the metric of Adam's denominators.
void update_and_sum(const Block<float>& block, SgdFlags flags, const SgdScalars<float>& scalars,
                    const ring_prox::Run& run, ring_prox::Moments& sums);
void update_and_sum(const Block<float>& block, AdamFlags flags, const AdamScalars<float>& scalars,
                    const ring_prox::Run& run, ring_prox::Moments& sums);

}  // namespace loco::optim_step
