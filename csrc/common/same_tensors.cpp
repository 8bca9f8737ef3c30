// Reads tensors through DLPack's C interface, which needs no reference and no conversion to a list of the dispatcher.

// torch's copy of dlpack.h, which needs nothing of torch, refuses to compile when the stable ABI is requested.
#undef TORCH_TARGET_VERSION
#include "common/same_tensors.h"

#include <algorithm>

namespace loco {
namespace {

// Calls visit(tensor) for each parameter and its states; returns false at the first that is missing or returns false.
template <class Visit>
bool for_tensors(PyObject* params, PyObject* states, PyObject* names, const Visit& visit) {
  if (!PyList_Check(params) || !PyList_Check(states) || !PyTuple_Check(names)) return false;
  const bool has_states = PyList_GET_SIZE(states) > 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); ++i) {
    if (!visit(PyList_GET_ITEM(params, i))) return false;
    if (!has_states) continue;
    if (i >= PyList_GET_SIZE(states)) return false;
    PyObject* const state = PyList_GET_ITEM(states, i);
    if (!PyDict_Check(state)) return false;
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(names); ++k) {
      PyObject* const tensor = PyDict_GetItemWithError(state, PyTuple_GET_ITEM(names, k));
      if (tensor == nullptr || !visit(tensor)) return false;
    }
  }
  return true;
}

}  // namespace

SameTensors::SameTensors(const DLPackExchangeAPI* api, PyObject* params, PyObject* states, PyObject* names)
    : api_(api) {
  complete_ = for_tensors(params, states, names, [&](PyObject* tensor) { return remember(tensor); });
}

PyObject* SameTensors::find(PyObject* params, PyObject* states, PyObject* names) const {
  if (!complete_) Py_RETURN_NONE;
  PyObject* const list = PyList_New(static_cast<Py_ssize_t>(known_.size()));
  if (list == nullptr) return nullptr;
  size_t index = 0;
  const int64_t* extents = extents_.data();
  const bool same = for_tensors(params, states, names, [&](PyObject* tensor) {
    const size_t at = index;
    if (!is_same(tensor, index, extents)) return false;
    Py_INCREF(tensor);
    PyList_SET_ITEM(list, at, tensor);
    return true;
  });
  if (same && index == known_.size()) return list;
  Py_DECREF(list);
  Py_RETURN_NONE;
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
