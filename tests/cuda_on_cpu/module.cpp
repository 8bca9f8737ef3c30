// The Python module of library.cpp; launches(): of kernels since the start.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "launch.h"

static PyObject* launches(PyObject*, PyObject*) { return PyLong_FromLongLong(cuda_on_cpu::launches); }

static PyMethodDef methods[] = {{"launches", launches, METH_NOARGS, nullptr}, {}};
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_C_cuda_on_cpu", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__C_cuda_on_cpu() { return PyModule_Create(&definition); }
