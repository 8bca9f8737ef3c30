// The pybind11 module of library.cpp; launches(): of kernels since the start.
#undef TORCH_TARGET_VERSION
#include <pybind11/pybind11.h>

#include "launch.h"

PYBIND11_MODULE(_C_cuda_on_cpu, module) {
  module.def("launches", [] { return cuda_on_cpu::launches; });
}
