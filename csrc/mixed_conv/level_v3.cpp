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
#pragma GCC target("arch=x86-64-v3")
#include "block_sparse/lanes_v3.h"
#include "mixed_conv/level.h"

namespace loco::mixed_conv {

using Double = Tiled<block_sparse::v3::Double, 6, 2>;
using Float = Tiled<block_sparse::v3::Float, 6, 2>;

const Level kLevelV3 = level_of<Double, Float>("x86-64-v3", [] { return __builtin_cpu_supports("x86-64-v3") != 0; });

}  // namespace loco::mixed_conv
#endif
