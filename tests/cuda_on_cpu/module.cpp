// The pybind11 module of library.cpp.
#undef TORCH_TARGET_VERSION
#include <pybind11/pybind11.h>

#include "common/registry.h"

PYBIND11_MODULE(_C_cuda_on_cpu, module) { module.def("release", &loco::release); }
