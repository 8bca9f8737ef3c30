// All functions that return vectors are inlined, so their ABI does not matter.
#pragma GCC diagnostic ignored "-Wpsabi"
#include "block_sparse/lanes_portable.h"
#include "mixed_conv/level.h"

namespace loco::mixed_conv {

using Double = Tiled<block_sparse::portable::Double, 4, 2>;
using Float = Tiled<block_sparse::portable::Float, 4, 2>;

const Level kLevelPortable = level_of<Double, Float>("portable", [] { return true; });

}  // namespace loco::mixed_conv
