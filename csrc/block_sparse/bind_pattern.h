// Python bindings of pattern.h for numpy arrays, as functions of the module _C.
#pragma once

namespace pybind11 {
class module_;
}

namespace loco::block_sparse {

void define_pattern(pybind11::module_& module);

}  // namespace loco::block_sparse
