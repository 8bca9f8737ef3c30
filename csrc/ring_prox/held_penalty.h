// A penalty that is kept for many steps.
#pragma once

#include <optional>

#include "common/registry.h"
#include "common/stable.h"
#include "ring_prox/penalty.h"

namespace loco::ring_prox {

struct HeldPenalty : Kept {
  Penalty penalty;
  std::optional<Tensor> factors;  // of each kernel's thresholds, which may change from step to step; none: ones
};

}  // namespace loco::ring_prox
