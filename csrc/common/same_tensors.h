// Tells whether the tensors of an optimizer are where they were before.
#pragma once

#include <ATen/dlpack.h>
#include <Python.h>

#include <cstdint>
#include <vector>

namespace loco {

// The memory, sizes, strides, dtypes and devices of parameters and their states. It refers to no tensor, so that all of
// them can be freed or swapped at any time. DLPack tells neither whether a tensor is lazily negated nor the size of its
// storage. A storage that is made smaller moves, and is seen by its address unless it moves back.
//
// params: a list of tensors. states: a list of dicts, one per parameter, or an empty list. names: a tuple of the keys
// of the dicts' tensors.
class SameTensors {
 public:
  // api: of torch.Tensor.__dlpack_c_exchange_api__.
  SameTensors(const DLPackExchangeAPI* api, PyObject* params, PyObject* states, PyObject* names);

  // Returns a new list of the tensors, each parameter before its states, or None unless all are where those given to
  // the constructor were.
  PyObject* find(PyObject* params, PyObject* states, PyObject* names) const;

 private:
  struct Identity {
    void* data;
    DLDevice device;
    DLDataType dtype;
    int32_t ndim;
  };

  bool read(PyObject* tensor, DLTensor& found) const;
  bool remember(PyObject* tensor);
  bool is_same(PyObject* tensor, size_t& index, const int64_t*& extents) const;

  const DLPackExchangeAPI* api_;
  bool complete_;  // whether all tensors could be read
  std::vector<Identity> known_;
  std::vector<int64_t> extents_;  // sizes, then strides, of each tensor
};

}  // namespace loco
