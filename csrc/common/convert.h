// Converts contiguous elements of any dtype to and from the compute dtypes (float, double).
#pragma once

#include <cstdint>

#include "common/capability.h"
#include "common/dtype.h"

namespace loco {

// load converts from `dtype`, store converts to it. from, to: [count], contiguous. bfloat16 and float16 elements are
// stored as uint16_t bit patterns.
struct Conversions {
  void (*load_float)(DType dtype, const void* from, float* to, int64_t count);
  void (*load_double)(DType dtype, const void* from, double* to, int64_t count);
  void (*store_float)(DType dtype, const float* from, void* to, int64_t count);
  void (*store_double)(DType dtype, const double* from, void* to, int64_t count);
};

LOCO_TABLE(Conversions, conversions)

inline void load(DType dtype, const void* from, float* to, int64_t count) {
  conversions().load_float(dtype, from, to, count);
}
inline void load(DType dtype, const void* from, double* to, int64_t count) {
  conversions().load_double(dtype, from, to, count);
}
inline void store(DType dtype, const float* from, void* to, int64_t count) {
  conversions().store_float(dtype, from, to, count);
}
inline void store(DType dtype, const double* from, void* to, int64_t count) {
  conversions().store_double(dtype, from, to, count);
}

}  // namespace loco
