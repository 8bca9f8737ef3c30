#include "block_sparse/lanes_portable.h"
#include "block_sparse/level.h"

namespace loco::block_sparse {

const Level kLevelPortable = level_of<portable::Double, portable::Float>("portable", [] { return true; });

}  // namespace loco::block_sparse
