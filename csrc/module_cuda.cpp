// The pybind11 module _C_cuda: importing it registers the operators for CUDA tensors.

// torch 2.11's copy of pybind11 refuses to be included where the stable ABI is asked for. This file uses none of it.
#undef TORCH_TARGET_VERSION
#include <cuda.h>
#include <pybind11/pybind11.h>

#include <string>

#include "common/registry.h"

PYBIND11_MODULE(_C_cuda, module) {
  module.def("build_info", [] {
    pybind11::dict info;
    info["cuda"] = std::to_string(CUDA_VERSION / 1000) + "." + std::to_string(CUDA_VERSION % 1000 / 10);
    info["architectures"] = LOCO_CUDA_ARCHITECTURES;
    return info;
  });
  module.def("release", &loco::release);
}
