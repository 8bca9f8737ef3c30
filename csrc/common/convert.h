// Converts contiguous elements of any dtype to and from the compute dtypes (float, double), vectorised for each x86-64
// level.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace loco {

// load converts from `dtype`, store converts to it. from, to: [count], contiguous. bfloat16 and float16 elements are
// stored as uint16_t bit patterns.
void load(DType dtype, const void* from, float* to, int64_t count);
void load(DType dtype, const void* from, double* to, int64_t count);
void store(DType dtype, const float* from, void* to, int64_t count);
void store(DType dtype, const double* from, void* to, int64_t count);

}  // namespace loco
