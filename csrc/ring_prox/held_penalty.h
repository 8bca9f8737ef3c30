// A penalty that is kept for many steps.
#pragma once

#include "common/registry.h"
#include "common/stable.h"
#include "ring_prox/penalty.h"

namespace loco::ring_prox {

struct HeldPenalty : Kept {
  Penalty penalty;
};

}  // namespace loco::ring_prox
