// Conversion between dtypes: to[i] = from[i], rounded to nearest even where the type of `to` is narrower.
//
// from and to are contiguous [count] and do not overlap. A call runs on the calling thread.
#include "common/convert.h"

#define LOCO_RESTRICT __restrict__

namespace loco {
LOCO_KERNELS_BEGIN

template <typename T>
void load_any(DType dtype, const void* from, T* LOCO_RESTRICT to, int64_t count) {
  const auto* half = static_cast<const uint16_t*>(from);
  switch (dtype) {
    case DType::f64:
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(static_cast<const double*>(from)[i]);
      break;
    case DType::f32:
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(static_cast<const float*>(from)[i]);
      break;
    case DType::bf16:
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(bf16_to_float(half[i]));
      break;
    case DType::f16:
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(f16_to_float(half[i]));
      break;
  }
}

template <typename T>
void store_any(DType dtype, const T* LOCO_RESTRICT from, void* to, int64_t count) {
  auto* half = static_cast<uint16_t*>(to);
  switch (dtype) {
    case DType::f64:
      for (int64_t i = 0; i < count; ++i) static_cast<double*>(to)[i] = static_cast<double>(from[i]);
      break;
    case DType::f32:
      for (int64_t i = 0; i < count; ++i) static_cast<float*>(to)[i] = static_cast<float>(from[i]);
      break;
    case DType::bf16:
      for (int64_t i = 0; i < count; ++i) half[i] = float_to_bf16(static_cast<float>(from[i]));
      break;
    case DType::f16:
      for (int64_t i = 0; i < count; ++i) half[i] = float_to_f16(static_cast<float>(from[i]));
      break;
  }
}

const Conversions conversions{load_any<float>, load_any<double>, store_any<float>, store_any<double>};

LOCO_KERNELS_END
}  // namespace loco
