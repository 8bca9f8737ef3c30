// Registers the schemas of all operators with torch.
#include "schemas.h"

STABLE_TORCH_LIBRARY(loco_ext, m) { loco::define_operators(m); }
