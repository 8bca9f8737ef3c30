// Conversion between dtypes: to[i] = from[i], rounded to nearest even where the type of `to` is narrower.
//
// from and to are contiguous [count] and do not overlap. A call runs on the calling thread.
#include "common/convert.h"

namespace loco {
LOCO_KERNELS_BEGIN

template <typename T>
void load_all(DType dtype, const void* from, T* to, int64_t count) {
  with_dtype(dtype, [=](auto constant) {
    constexpr DType of = decltype(constant)::value;
    const auto* __restrict__ stored = static_cast<const Stored<of>*>(from);
    T* __restrict__ wide = to;
    for (int64_t i = 0; i < count; ++i) wide[i] = widened<of, T>(stored[i]);
  });
}

template <typename T>
void store_all(DType dtype, const T* from, void* to, int64_t count) {
  with_dtype(dtype, [=](auto constant) {
    constexpr DType of = decltype(constant)::value;
    const T* __restrict__ wide = from;
    auto* __restrict__ stored = static_cast<Stored<of>*>(to);
    for (int64_t i = 0; i < count; ++i) stored[i] = narrowed<of>(wide[i]);
  });
}

const Conversions<float> float_conversions{load_all<float>, store_all<float>};
const Conversions<double> double_conversions{load_all<double>, store_all<double>};

LOCO_KERNELS_END
}  // namespace loco
