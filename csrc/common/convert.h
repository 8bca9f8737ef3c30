// Conversions between contiguous elements of any type and the types that arithmetic is done in, vectorised for each
// x86-64 level.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace loco {

// bfloat16 and float16 are held as their bits.
void load(DType dtype, const void* from, float* to, int64_t count);
void load(DType dtype, const void* from, double* to, int64_t count);
void store(DType dtype, const float* from, void* to, int64_t count);
void store(DType dtype, const double* from, void* to, int64_t count);

}  // namespace loco
