// The pybind11 module of library.cpp.
//
// launches(): the number of launches since the start. set_order(order): see cuda_on_cpu.h. set_missing(name): kernels
// whose names contain it are built for no device; "": none are missing. set_device(address, index): that of the tensor
// whose data begins at the address; -1 forgets it.
#undef TORCH_TARGET_VERSION
#include <pybind11/pybind11.h>

#include <string>

#include "launch.h"
#include "library.h"

PYBIND11_MODULE(_C_cuda_on_cpu, module) {
  module.def("launches", [] { return cuda_on_cpu::launches; });
  module.def("set_order", [](const std::string& order) { cuda_on_cpu::set_order(order.c_str()); });
  module.def("set_missing", [](const std::string& name) {
    static std::string kept;
    kept = name;
    cuda_on_cpu::missing_kernel = kept.empty() ? nullptr : kept.c_str();
  });
  module.def("set_device", [](uintptr_t address, int index) {
    if (index < 0) {
      cuda_on_cpu::device_of().erase(address);
    } else {
      cuda_on_cpu::device_of()[address] = index;
    }
  });
}
