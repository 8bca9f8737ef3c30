// Reads tensors through DLPack's C interface, which needs no reference and no conversion to a list of the dispatcher.

// torch's copy of dlpack.h, which needs nothing of torch, refuses to compile when the stable ABI is requested.
#undef TORCH_TARGET_VERSION
#include "common/same_tensors.h"

#include <algorithm>
#include <utility>

namespace loco {
namespace {

// Appends the values of a dict; returns false unless its keys are the owners, in the same order.
bool read_values(PyObject* dict, PyObject* owners, std::vector<PyObject*>& values) {
  if (!PyDict_Check(dict) || !PyList_Check(owners) || PyDict_Size(dict) != PyList_GET_SIZE(owners)) return false;
  PyObject *key, *value;
  for (Py_ssize_t at = 0, i = 0; PyDict_Next(dict, &at, &key, &value); ++i) {
    if (key != PyList_GET_ITEM(owners, i)) return false;
    values.push_back(value);
  }
  return true;
}

}  // namespace

SameTensors::SameTensors(const DLPackExchangeAPI* api, PyObject* params, PyObject* state, PyObject* owners,
                         std::vector<size_t> places, PyObject* names)
    : api_(api), places_(std::move(places)) {
  complete_ = for_tensors(params, state, owners, names, [&](PyObject* tensor) { return remember(tensor); });
}

PyObject* SameTensors::gradients(PyObject* params, PyObject* state, PyObject* owners, PyObject* names) const {
  static PyObject* const grad = PyUnicode_InternFromString("grad");
  if (!are_same(params, state, owners, names)) Py_RETURN_NONE;
  PyObject* const list = PyList_New(PyList_GET_SIZE(params));
  for (Py_ssize_t i = 0; list != nullptr && i < PyList_GET_SIZE(params); ++i) {
    PyObject* const found = PyObject_GetAttr(PyList_GET_ITEM(params, i), grad);
    if (found == nullptr || found == Py_None) {
      Py_XDECREF(found);
      Py_DECREF(list);
      if (found == nullptr) return nullptr;
      Py_RETURN_NONE;
    }
    PyList_SET_ITEM(list, i, found);
  }
  return list;
}

bool SameTensors::are_same(PyObject* params, PyObject* state, PyObject* owners, PyObject* names) const {
  size_t index = 0;
  const int64_t* extents = extents_.data();
  return complete_ &&
         for_tensors(params, state, owners, names, [&](PyObject* tensor) { return is_same(tensor, index, extents); }) &&
         index == known_.size();
}

// Calls visit(tensor) for each parameter and its states; returns false at the first that is missing or returns false.
template <class Visit>
bool SameTensors::for_tensors(PyObject* params, PyObject* state, PyObject* owners, PyObject* names,
                              const Visit& visit) const {
  std::vector<PyObject*> states;
  if (!PyList_Check(params) || !PyTuple_Check(names) || !read_values(state, owners, states)) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); ++i) {
    if (!visit(PyList_GET_ITEM(params, i))) return false;
    if (places_.empty()) continue;
    if (static_cast<size_t>(i) >= places_.size() || places_[i] >= states.size()) return false;
    PyObject* const of_param = states[places_[i]];
    if (!PyDict_Check(of_param)) return false;
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(names); ++k) {
      PyObject* const tensor = PyDict_GetItemWithError(of_param, PyTuple_GET_ITEM(names, k));
      if (tensor == nullptr || !visit(tensor)) return false;
    }
  }
  return true;
}

// Returns false for what is no tensor with memory, such as a fake tensor.
bool SameTensors::read(PyObject* tensor, DLTensor& found) const {
  if (api_->dltensor_from_py_object_no_sync(tensor, &found) == 0) return true;
  PyErr_Clear();
  return false;
}

bool SameTensors::remember(PyObject* tensor) {
  DLTensor found;
  if (!read(tensor, found)) return false;
  known_.push_back({found.data, found.device, found.dtype, found.ndim});
  extents_.insert(extents_.end(), found.shape, found.shape + found.ndim);
  extents_.insert(extents_.end(), found.strides, found.strides + found.ndim);
  return true;
}

// Compares the tensor with that of the index, and advances both to the next one.
bool SameTensors::is_same(PyObject* tensor, size_t& index, const int64_t*& extents) const {
  DLTensor found;
  if (index == known_.size() || !read(tensor, found)) return false;
  const Identity& known = known_[index++];
  const bool same = found.data == known.data && found.device.device_type == known.device.device_type &&
                    found.device.device_id == known.device.device_id && found.dtype.code == known.dtype.code &&
                    found.dtype.bits == known.dtype.bits && found.ndim == known.ndim &&
                    std::equal(found.shape, found.shape + found.ndim, extents) &&
                    std::equal(found.strides, found.strides + found.ndim, extents + found.ndim);
  extents += 2 * known.ndim;
  return same;
}

}  // namespace loco
