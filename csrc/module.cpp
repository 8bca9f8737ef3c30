// The pybind11 module _C: host functions without torch.

// torch 2.11's copy of pybind11 refuses to be included where the stable ABI is asked for. This file uses none of it.
#undef TORCH_TARGET_VERSION
#include <pybind11/pybind11.h>

#include "block_sparse/bind_pattern.h"
#include "block_sparse/cpu.h"
#include "common/registry.h"
#include "optim_step/cpu.h"

PYBIND11_MODULE(_C, module) {
  module.def("build_info", [] {
    pybind11::dict info;
    info["compiler"] = __VERSION__;
    info["cpu_capability"] = loco::optim_step::cpu_capability();
    return info;
  });
  module.def("release", &loco::release);
  loco::block_sparse::define_pattern(module);
  module.def("block_sparse_levels", [] {
    pybind11::list names;
    for (const char* const* name = loco::block_sparse::levels(); *name; ++name) names.append(*name);
    return names;
  });
  module.def("use_block_sparse_level", [](const char* name) {
    if (!loco::block_sparse::use_level(name))
      throw pybind11::value_error("name: expected one of block_sparse_levels()");
  });
}
