// Defines the pybind11 module _C_cuda. Importing it registers the operators for CUDA tensors.

// torch 2.11's copy of pybind11 refuses to compile when the stable ABI is requested. This file does not use that ABI.
#undef TORCH_TARGET_VERSION
#include <cuda.h>
#include <pybind11/pybind11.h>

#include <string>

PYBIND11_MODULE(_C_cuda, module) {
  module.def("build_info", [] {
    pybind11::dict info;
    info["cuda"] = std::to_string(CUDA_VERSION / 1000) + "." + std::to_string(CUDA_VERSION % 1000 / 10);
    info["architectures"] = LOCO_CUDA_ARCHITECTURES;
    return info;
  });
}
