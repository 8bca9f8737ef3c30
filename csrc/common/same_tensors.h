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
class SameTensors {
 public:
  // api: of torch.Tensor.__dlpack_c_exchange_api__.
  // params: a list of tensors. state: an optimizer's dict of a dict of states for each parameter. owners: a list of the
  // keys of state. places: for each parameter, the place of its states in state, or empty if there are none. names: a
  // tuple of the keys of the states.
  SameTensors(const DLPackExchangeAPI* api, PyObject* params, PyObject* state, PyObject* owners,
              std::vector<size_t> places, PyObject* names);

  // Returns a new list of the parameters' gradients, or None unless all have one, state has the owners in the same
  // order, and all parameters and states are where those given to the constructor were.
  PyObject* gradients(PyObject* params, PyObject* state, PyObject* owners, PyObject* names) const;

 private:
  struct Identity {
    void* data;
    DLDevice device;
    DLDataType dtype;
    int32_t ndim;
  };

  template <class Visit>
  bool for_tensors(PyObject* params, PyObject* state, PyObject* owners, PyObject* names, const Visit& visit) const;
  bool read(PyObject* tensor, DLTensor& found) const;
  bool remember(PyObject* tensor);
  bool are_same(PyObject* params, PyObject* state, PyObject* owners, PyObject* names) const;
  bool is_same(PyObject* tensor, size_t& index, const int64_t*& extents) const;

  const DLPackExchangeAPI* api_;
  std::vector<size_t> places_;
  bool complete_;  // whether all tensors could be read
  std::vector<Identity> known_;
  std::vector<int64_t> extents_;  // sizes, then strides, of each tensor
};

}  // namespace loco
