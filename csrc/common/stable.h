// Reading torch tensors through LibTorch's stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

#include "common/dtype.h"

namespace loco {

using torch::stable::Tensor;

// A strided CPU tensor of one of the four element types; sizes and strides stay owned by the tensor.
struct View {
  void* data;
  int64_t ndim;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t numel;
  DType dtype;
};

inline std::string shape_text(const int64_t* sizes, int64_t ndim) {
  std::string text = "(";
  for (int64_t d = 0; d < ndim; ++d) text += (d ? ", " : "") + std::to_string(sizes[d]);
  return text + ")";
}

inline bool to_dtype(int32_t code, DType& dtype) {
  static const int32_t f64 = aoti_torch_dtype_float64(), f32 = aoti_torch_dtype_float32();
  static const int32_t bf16 = aoti_torch_dtype_bfloat16(), f16 = aoti_torch_dtype_float16();
  if (code == f32) return dtype = DType::f32, true;
  if (code == f64) return dtype = DType::f64, true;
  if (code == bf16) return dtype = DType::bf16, true;
  if (code == f16) return dtype = DType::f16, true;
  return false;
}

// list and index name the tensor in an error: "grads[3]". Layouts without strides or memory of their own (sparse,
// mkldnn) are refused by torch when asked for them.
inline View view_of(const Tensor& tensor, const char* list, size_t index) {
  static const int32_t cpu = aoti_torch_device_type_cpu();
  const AtenTensorHandle handle = tensor.get();
  int32_t device = 0, code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device));
  STD_TORCH_CHECK(device == cpu, list, "[", index, "]: expected a CPU tensor, got one of another device");
  View view;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &code));
  STD_TORCH_CHECK(to_dtype(code, view.dtype), list, "[", index,
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
  return view;
}

// The value of a one-element float32 or float64 tensor.
inline double scalar_of(const Tensor& tensor, const char* name) {
  const View view = view_of(tensor, name, 0);
  STD_TORCH_CHECK(view.numel == 1, name, ": expected one element, got ", view.numel);
  STD_TORCH_CHECK(view.dtype == DType::f32 || view.dtype == DType::f64, name, ": expected float32 or float64");
  return view.dtype == DType::f64 ? *static_cast<const double*>(view.data) : *static_cast<const float*>(view.data);
}

// torch's intra-op thread pool, as a plain function.
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
