// Reads torch tensors through LibTorch's stable ABI.
#pragma once

#include "common/torch_errors.h"
// torch's headers use what the one above defines.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#ifdef USE_CUDA
#include <torch/csrc/stable/accelerator.h>
#endif

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/dtype.h"

namespace loco {

using torch::stable::Tensor;

// Refers to a tensor that someone else owns.
struct TensorRef {
  AtenTensorHandle handle;

  TensorRef(AtenTensorHandle handle) : handle(handle) {}
  TensorRef(const Tensor& tensor) : handle(tensor.get()) {}
};

// A strided tensor of one of the four element types. Sizes and strides (in elements, [ndim]) stay owned by the tensor.
struct View {
  void* data;
  int64_t ndim;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t numel;
  DType dtype;
};

// The device that tensors are expected on. The CPU's index is -1.
struct DeviceId {
  int32_t type, index;

  static DeviceId cpu() {
    static const int32_t type = aoti_torch_device_type_cpu();
    return {type, -1};
  }
};

inline DeviceId device_of(TensorRef tensor) {
  DeviceId device;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.handle, &device.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.handle, &device.index));
  return device;
}

inline std::string device_text(const DeviceId& device) {
  const std::string type = device.type == DeviceId::cpu().type            ? "cpu"
                           : device.type == aoti_torch_device_type_cuda() ? "cuda"
                                                                          : "another type";
  return device.index < 0 ? type : type + ":" + std::to_string(device.index);
}

inline std::string shape_text(const int64_t* sizes, int64_t ndim) {
  std::string text = "(";
  for (int64_t d = 0; d < ndim; ++d) text += (d ? ", " : "") + std::to_string(sizes[d]);
  return text + ")";
}

inline std::string shape_text(const View& view) { return shape_text(view.sizes, view.ndim); }

inline bool same_shape(const View& a, const View& b) {
  return a.ndim == b.ndim && std::equal(a.sizes, a.sizes + a.ndim, b.sizes);
}

// Converts torch's dtype code; returns false if it is none of the four element types.
inline bool to_dtype(int32_t code, DType& dtype) {
  static const int32_t f64 = aoti_torch_dtype_float64(), f32 = aoti_torch_dtype_float32();
  static const int32_t bf16 = aoti_torch_dtype_bfloat16(), f16 = aoti_torch_dtype_float16();
  if (code == f32) return dtype = DType::f32, true;
  if (code == f64) return dtype = DType::f64, true;
  if (code == bf16) return dtype = DType::bf16, true;
  if (code == f16) return dtype = DType::f16, true;
  return false;
}

// Throws unless all elements are inside the storage, which may have been freed or shrunk since the tensor was created
// (untyped_storage().resize_). Sizes and strides: [ndim].
inline void check_storage(TensorRef tensor, int64_t ndim, const int64_t* sizes, const int64_t* strides,
                          int64_t element_bytes, const char* list, size_t index) {
  int64_t bytes = 0, last = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor.handle, &last));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.handle, &bytes));
  for (int64_t d = 0; d < ndim; ++d) {
    if (sizes[d] == 0) return;
    last += (sizes[d] - 1) * strides[d];
  }
  LOCO_CHECK((last + 1) * element_bytes <= bytes, list, "[", index, "]: expected ", (last + 1) * element_bytes,
             " bytes of storage, got ", bytes, ": it has been freed or made smaller");
}

// Returns a view of the tensor; throws unless it is strided (not sparse, say), on the expected device, of one of the
// four element types, and inside its storage. Errors name the tensor by list and index: "grads[3]".
inline View view_of(TensorRef tensor, const char* list, size_t index, const DeviceId& expected = DeviceId::cpu()) {
  static const int32_t strided = aoti_torch_layout_strided();
  const AtenTensorHandle handle = tensor.handle;
  int32_t code = 0, layout = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(handle, &layout));
  LOCO_CHECK(layout == strided, list, "[", index, "]: expected a strided tensor, got one of another layout");
  const DeviceId device = device_of(tensor);
  LOCO_CHECK(device.type == expected.type && device.index == expected.index, list, "[", index,
             "]: expected a tensor on ", device_text(expected), ", got one on ", device_text(device));
  View view;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &code));
  LOCO_CHECK(to_dtype(code, view.dtype), list, "[", index,
             "]: expected float32, float64, bfloat16 or float16, got another dtype");
  int64_t *sizes, *strides;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &view.ndim));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &view.data));
  view.sizes = sizes;
  view.strides = strides;
  view.numel = 1;
  for (int64_t d = 0; d < view.ndim; ++d) view.numel *= sizes[d];
  check_storage(tensor, view.ndim, view.sizes, view.strides, element_size(view.dtype), list, index);
  return view;
}

// Returns a view of a one-element float32 or float64 tensor; throws for any other.
inline View scalar_view(TensorRef tensor, const char* list, size_t index, const DeviceId& expected = DeviceId::cpu()) {
  const View view = view_of(tensor, list, index, expected);
  LOCO_CHECK(view.numel == 1 && (view.dtype == DType::f32 || view.dtype == DType::f64), list, "[", index,
             "]: expected one float32 or float64 element");
  return view;
}

// Returns the element of a scalar_view on the CPU.
inline double value_of(const View& scalar) {
  return scalar.dtype == DType::f64 ? *static_cast<const double*>(scalar.data)
                                    : *static_cast<const float*>(scalar.data);
}

// Returns uninitialised memory on the tensor's device.
inline Tensor new_bytes(const Tensor& like, int64_t count) {
  return torch::stable::new_empty(like, {count}, torch::headeronly::ScalarType::Byte, std::nullopt, std::nullopt,
                                  std::nullopt);
}

// A contiguous one-dimensional int64 tensor on the CPU.
struct Indices {
  const int64_t* data;
  int64_t count;
};

inline Indices indices_of(const Tensor& tensor, const char* name) {
  int32_t code = 0;
  void* data = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  LOCO_CHECK(code == aoti_torch_dtype_int64() && tensor.dim() == 1 && tensor.is_contiguous() &&
                 device_of(tensor).type == DeviceId::cpu().type,
             name, ": expected a contiguous one-dimensional int64 tensor on the CPU");
  const int64_t count = tensor.size(0), stride = 1;
  check_storage(tensor, 1, &count, &stride, sizeof(int64_t), name, 0);
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &data));
  return {static_cast<const int64_t*>(data), count};
}

#ifdef USE_CUDA
// Returns torch's current stream on the device, a cudaStream_t.
inline void* current_stream(int device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}
#endif

// Runs body on torch's intra-op thread pool; matches ParallelFor.
inline void parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*),
                         void* context) {
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, body, context));
}

inline int64_t num_threads() {
  uint32_t count = 1;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&count));
  return count;
}

}  // namespace loco
