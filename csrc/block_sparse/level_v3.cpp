#include "common/platform.h"

#ifdef LOCO_X86_LEVELS
// Headers that other files share come before the pragma: otherwise their inline functions would be compiled for this
// instruction set and used by all files.
#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "common/convert.h"
#include "common/parallel.h"
#pragma GCC target("arch=x86-64-v3")
#include "block_sparse/lanes_v3.h"
#include "block_sparse/level.h"

namespace loco::block_sparse {

const Level kLevelV3 =
    level_of<v3::Double, v3::Float>("x86-64-v3", [] { return __builtin_cpu_supports("x86-64-v3") != 0; });

}  // namespace loco::block_sparse
#endif
