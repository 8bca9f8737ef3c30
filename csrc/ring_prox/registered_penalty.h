// A penalty in the registry, which optimizer steps refer to by its handle.
#pragma once

#include "common/registry.h"
#include "common/stable.h"
#include "ring_prox/penalty.h"

namespace loco::ring_prox {

struct RegisteredPenalty : Registered {
  Penalty penalty;
};

}  // namespace loco::ring_prox
