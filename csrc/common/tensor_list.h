// Takes lists of tensors off the stack of a boxed call.
#pragma once

#include <Python.h>

#include <utility>
#include <vector>

#include "common/stable.h"

namespace loco {

// Owns the tensors of a list argument. In contrast to a std::vector<Tensor> it allocates nothing for each of them, and
// it waits for Python's lock once: whoever gives up the last reference to a tensor beside Python's needs the lock.
class TensorList {
 public:
  TensorList() = default;
  explicit TensorList(StableIValue value) {
    const auto list = torch::stable::detail::to<StableListHandle>(value);
    size_t size = 0;
    TORCH_ERROR_CODE_CHECK(torch_list_size(list, &size));
    handles_.resize(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue element;
      TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &element));
      handles_[i] = torch::stable::detail::to<AtenTensorHandle>(element);
    }
    TORCH_ERROR_CODE_CHECK(torch_delete_list(list));
  }
  TensorList(TensorList&& other) noexcept : handles_(std::exchange(other.handles_, {})) {}
  TensorList& operator=(TensorList&& other) noexcept {
    std::swap(handles_, other.handles_);
    return *this;
  }
  ~TensorList() {
    if (handles_.empty()) return;
    const PyGILState_STATE lock = PyGILState_Ensure();
    for (const AtenTensorHandle handle : handles_) aoti_torch_delete_tensor_object(handle);
    PyGILState_Release(lock);
  }

  size_t size() const { return handles_.size(); }
  TensorRef operator[](size_t index) const { return handles_[index]; }

 private:
  std::vector<AtenTensorHandle> handles_;
};

}  // namespace loco
