// Defines the Python module _C_cuda. Importing it registers the operators for CUDA tensors.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>

namespace {

PyObject* build_info(PyObject*, PyObject*) {
  PyObject* version = PyUnicode_FromFormat("%d.%d", CUDA_VERSION / 1000, CUDA_VERSION % 1000 / 10);
  return Py_BuildValue("{sNss}", "cuda", version, "architectures", LOCO_CUDA_ARCHITECTURES);
}

PyMethodDef methods[] = {{"build_info", build_info, METH_NOARGS, nullptr}, {}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C_cuda() { return PyModule_Create(&definition); }
