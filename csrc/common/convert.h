// Converts contiguous elements of any dtype to and from the compute dtypes (float, double).
#pragma once

#include <cstdint>

#include "common/capability.h"
#include "common/dtype.h"

namespace loco {

// load converts from `dtype`, store converts to it. from, to: [count], contiguous. bfloat16 and float16 elements are
// stored as uint16_t bit patterns.
template <typename T>
struct Conversions {
  void (*load)(DType dtype, const void* from, T* to, int64_t count);
  void (*store)(DType dtype, const T* from, void* to, int64_t count);
};

LOCO_TABLES(avx512, Conversions, conversions)

template <typename T>
void load(DType dtype, const void* from, T* to, int64_t count) {
  conversions<T>().load(dtype, from, to, count);
}

template <typename T>
void store(DType dtype, const T* from, void* to, int64_t count) {
  conversions<T>().store(dtype, from, to, count);
}

}  // namespace loco
