#include "common/platform.h"

#ifdef LOCO_X86_LEVELS
// Headers that other files share come before the pragma: otherwise their inline functions would be compiled for this
// instruction set and used by all files.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/convert.h"
#include "common/parallel.h"
// GCC 12 gives these warnings for its own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#include "block_sparse/lanes_v4.h"
#include "mixed_conv/level.h"

namespace loco::mixed_conv {

using Double = Tiled<block_sparse::v4::Double, 6, 4>;
using Float = Tiled<block_sparse::v4::Float, 6, 4>;

const Level kLevelV4 = level_of<Double, Float>("x86-64-v4", [] { return __builtin_cpu_supports("x86-64-v4") != 0; });

}  // namespace loco::mixed_conv
#endif
