#include "block_sparse/lanes_portable.h"
#include "block_sparse/level.h"

namespace loco::block_sparse {

const Level kLevelPortable = {"portable",
                              [] { return true; },
                              {kernels_of<Plain<portable::Double>>(), kernels_of<Plain<portable::Float>>(),
                               kernels_of<Converted<portable::Float>>(), kernels_of<Converted<portable::Float>>()}};

}  // namespace loco::block_sparse
