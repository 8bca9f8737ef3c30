// Defines the Python module _C: host functions that do not use torch. Importing it registers the operators.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>

#include "common/capability.h"
#include "optim_step/gpu_table.h"

namespace {

PyObject* build_info(PyObject*, PyObject*) {
  return Py_BuildValue("{ssss}", "compiler", __VERSION__, "cpu_capability", *loco::capabilities());
}

// Returns the offsets in bytes by which Triton's kernels read a table of optim_step/gpu_table.h.
PyObject* optim_step_table_fields(PyObject*, PyObject*) {
  using namespace loco::optim_step;
#define LOCO_FIELD(name) #name, static_cast<Py_ssize_t>(offsetof(Entry, name))
  return Py_BuildValue("{snsnsnsnsnsnsnsnsnsnsnsnsnsnsnsn}", LOCO_FIELD(w), LOCO_FIELD(state), LOCO_FIELD(counter),
                       LOCO_FIELD(numel), LOCO_FIELD(map), LOCO_FIELD(run), LOCO_FIELD(period), LOCO_FIELD(nests),
                       LOCO_FIELD(group), LOCO_FIELD(ordinal), LOCO_FIELD(map_kind), LOCO_FIELD(first),
                       LOCO_FIELD(counter_is_double), "entry_size", static_cast<Py_ssize_t>(sizeof(Entry)), "nest_size",
                       static_cast<Py_ssize_t>(sizeof(loco::Nest)), "nest_axes",
                       static_cast<Py_ssize_t>(offsetof(loco::Nest, axes)));
#undef LOCO_FIELD
}

// Returns the instruction sets that this machine has and the kernels are compiled for, best first.
PyObject* cpu_capabilities(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (const char* const* name = loco::capabilities(); names && *name; ++name) {
    PyObject* text = PyUnicode_FromString(*name);
    if (!text || PyList_Append(names, text) != 0) Py_CLEAR(names);
    Py_XDECREF(text);
  }
  return names;
}

// Chooses one of cpu_capabilities, for tests.
PyObject* use_cpu_capability(PyObject*, PyObject* name) {
  const char* text = PyUnicode_AsUTF8(name);
  if (!text) return nullptr;
  if (loco::use_capability(text)) Py_RETURN_NONE;
  PyErr_SetString(PyExc_ValueError, "name: expected one of cpu_capabilities()");
  return nullptr;
}

PyMethodDef methods[] = {{"build_info", build_info, METH_NOARGS, nullptr},
                         {"optim_step_table_fields", optim_step_table_fields, METH_NOARGS, nullptr},
                         {"cpu_capabilities", cpu_capabilities, METH_NOARGS, nullptr},
                         {"use_cpu_capability", use_cpu_capability, METH_O, nullptr},
                         {}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&definition); }
