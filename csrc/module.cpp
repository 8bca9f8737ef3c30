// Defines the pybind11 module _C: host functions that need no tensors, and SameTensors, which reads them through
// DLPack.

// torch 2.11's copy of pybind11 refuses to compile when the stable ABI is requested. This file does not use that ABI.
#undef TORCH_TARGET_VERSION
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "common/capability.h"
#include "common/same_tensors.h"
#include "optim_step/gpu_table.h"

namespace {

// Returns the offsets in bytes by which Triton's kernels read a table of optim_step/gpu_table.h.
pybind11::dict table_fields() {
  using namespace loco::optim_step;
  pybind11::dict fields;
#define LOCO_FIELD(name) fields[#name] = offsetof(Entry, name)
  LOCO_FIELD(w), LOCO_FIELD(state), LOCO_FIELD(counter), LOCO_FIELD(numel), LOCO_FIELD(map), LOCO_FIELD(run);
  LOCO_FIELD(period), LOCO_FIELD(nests), LOCO_FIELD(group), LOCO_FIELD(ordinal), LOCO_FIELD(map_kind);
  LOCO_FIELD(first), LOCO_FIELD(counter_is_double);
#undef LOCO_FIELD
  fields["entry_size"] = sizeof(Entry);
  fields["nest_size"] = sizeof(loco::Nest);
  fields["nest_axes"] = offsetof(loco::Nest, axes);
  return fields;
}

const DLPackExchangeAPI* exchange_api() {
  namespace py = pybind11;
  const py::object capsule = py::module_::import("torch").attr("Tensor").attr("__dlpack_c_exchange_api__");
  return py::reinterpret_borrow<py::capsule>(capsule).get_pointer<DLPackExchangeAPI>();
}

void define_same_tensors(pybind11::module_& module) {
  namespace py = pybind11;
  py::class_<loco::SameTensors>(module, "SameTensors")
      .def(py::init(
          [](py::object params, py::object state, py::object owners, std::vector<size_t> places, py::object names) {
            return new loco::SameTensors(exchange_api(), params.ptr(), state.ptr(), owners.ptr(), std::move(places),
                                         names.ptr());
          }))
      .def("gradients",
           [](const loco::SameTensors& self, py::object params, py::object state, py::object owners, py::object names) {
             PyObject* const found = self.gradients(params.ptr(), state.ptr(), owners.ptr(), names.ptr());
             if (found == nullptr) throw py::error_already_set();
             return py::reinterpret_steal<py::object>(found);
           });
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.def("build_info", [] {
    pybind11::dict info;
    info["compiler"] = __VERSION__;
    info["cpu_capability"] = *loco::capabilities();
    return info;
  });
  module.def("optim_step_table_fields", &table_fields);
  define_same_tensors(module);
  // The instruction sets that this machine has and the kernels are compiled for, best first, and a choice for tests.
  module.def("cpu_capabilities", [] {
    pybind11::list names;
    for (const char* const* name = loco::capabilities(); *name; ++name) names.append(*name);
    return names;
  });
  module.def("use_cpu_capability", [](const char* name) {
    if (!loco::use_capability(name)) throw pybind11::value_error("name: expected one of cpu_capabilities()");
  });
}
