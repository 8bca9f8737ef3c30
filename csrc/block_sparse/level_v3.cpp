#include "common/platform.h"

#ifdef LOCO_X86_LEVELS
// Headers of others come before the pragma: what they define belongs to all files.
#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "common/convert.h"
#include "common/parallel.h"
#pragma GCC target("arch=x86-64-v3")
#include "block_sparse/lanes_v3.h"
#include "block_sparse/level.h"

namespace loco::block_sparse {

const Level kLevelV3 = {"x86-64-v3",
                        [] { return __builtin_cpu_supports("x86-64-v3") != 0; },
                        {kernels_of<Plain<v3::Double>>(), kernels_of<Plain<v3::Float>>(),
                         kernels_of<Converted<v3::Float>>(), kernels_of<Converted<v3::Float>>()}};

}  // namespace loco::block_sparse
#endif
