// Checks and conversions of the block-sparse operators' arguments. The schemas are in schemas.h.
#pragma once

#include <optional>

#include "block_sparse/cpu.h"
#include "common/stable.h"

namespace loco::block_sparse {

// A contiguous one-dimensional int64 tensor on the CPU.
struct Indices {
  const int64_t* data;
  int64_t count;
};

inline Indices indices_of(const Tensor& tensor, const char* name) {
  int32_t code = 0;
  int64_t dims = 0;
  void* data = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &dims));
  LOCO_CHECK(code == aoti_torch_dtype_int64() && dims == 1 && tensor.is_contiguous() &&
                 device_of(tensor).type == DeviceId::cpu().type,
             name, ": expected a contiguous one-dimensional int64 tensor on the CPU");
  check_storage(tensor, sizeof(int64_t), name, 0);
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &data));
  return {static_cast<const int64_t*>(data), tensor.size(0)};
}

// Return indices after checking that they are in [0, bound).
inline Indices bounded(const Tensor& tensor, const char* name, int64_t bound) {
  const Indices indices = indices_of(tensor, name);
  uint64_t largest = 0;  // as unsigned numbers, negative indices exceed any bound
  for (int64_t i = 0; i < indices.count; ++i) {
    const auto index = static_cast<uint64_t>(indices.data[i]);
    largest = index > largest ? index : largest;
  }
  LOCO_CHECK(indices.count == 0 || largest < static_cast<uint64_t>(bound), name, ": expected indices from 0 to ",
             bound - 1);
  return indices;
}

// Return row starts after checking that they begin at 0, never descend and end at `total`.
inline Indices row_starts(const Tensor& tensor, const char* name, int64_t total) {
  const Indices starts = indices_of(tensor, name);
  bool ordered = starts.count >= 1 && starts.data[0] == 0 && starts.data[starts.count - 1] == total;
  for (int64_t i = 1; i < starts.count; ++i) ordered &= starts.data[i - 1] <= starts.data[i];
  LOCO_CHECK(ordered, name, ": expected row starts that do not descend, from 0 to ", total);
  return starts;
}

// Activations [batch, pixels, channels] in which channels have stride 1, or, with by_channel, pixels may have it
// instead.
struct Activations {
  View view;

  Activations(const Tensor& tensor, const char* name, bool by_channel = false) : view(view_of(tensor, name, 0)) {
    LOCO_CHECK(view.ndim == 3 && (channel_stride() == 1 || (by_channel && view.strides[1] == 1)), name,
               ": expected three dimensions, the channels of a pixel side by side");
  }

  int64_t batch() const { return view.sizes[0]; }
  int64_t pixels() const { return view.sizes[1]; }
  int64_t channels() const { return view.sizes[2]; }
  int64_t channel_stride() const { return view.sizes[2] <= 1 ? 1 : view.strides[2]; }
  Pixels layout() const { return {view.data, view.strides[0], view.strides[1], channel_stride()}; }
};

// Block values [blocks, groups, channels of a group in, channels of a group out], contiguous.
struct Blocks {
  View view;

  Blocks(const Tensor& tensor, DType dtype) : view(view_of(tensor, "values", 0)) {
    LOCO_CHECK(view.ndim == 4 && tensor.is_contiguous() && view.dtype == dtype,
               "values: expected a contiguous tensor of four dimensions, of the activations' dtype");
  }

  int64_t count() const { return view.sizes[0]; }
  int64_t groups() const { return view.sizes[1]; }
  int64_t in() const { return view.sizes[2]; }
  int64_t out() const { return view.sizes[3]; }
  bool of_one_element() const { return in() == 1 && out() == 1; }
};

}  // namespace loco::block_sparse
