// Vector arithmetic on 16 bytes with the compiler's vector extensions, for any CPU.
//
// An arithmetic multiplies words and adds the products to accumulators: multiply_add(a, b, c)[i] = a[i] * b[i] + c[i].
// Pointers are to contiguous elements, without alignment. kWidth is the number of accumulators in a vector, kVectors
// the widest tile in vectors, and kPair the number of elements in a word.
#pragma once

#include <cstring>

#include "block_sparse/modes.h"

namespace loco::block_sparse::portable {

template <typename T>
struct Lanes {
  typedef T Vec __attribute__((vector_size(16)));
  using In = Vec;
  using Word = T;
  using Acc = T;
  using Square = PlainSquare<Lanes<T>>;
  static constexpr int kWidth = 16 / sizeof(T), kVectors = 2, kPair = 1;

  static LOCO_INLINE Vec load(const T* at) {
    Vec value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  static LOCO_INLINE Vec load_f16(const uint16_t* at) {
    Vec value;
    for (int i = 0; i < kWidth; ++i) value[i] = f16_to_float(at[i]);
    return value;
  }
  static LOCO_INLINE void store(T* at, Vec value) { std::memcpy(at, &value, sizeof value); }
  static LOCO_INLINE In words(const T* at) { return load(at); }
  static LOCO_INLINE In broadcast(const char* at) { return *reinterpret_cast<const T*>(at) - Vec{}; }
  static LOCO_INLINE Vec multiply_add(In a, In b, Vec c) { return a * b + c; }
  static LOCO_INLINE void totals(const Vec (&of)[4], Acc* to) { totals_of_lanes<Lanes<T>>(of, to); }
};

using Float = Lanes<float>;
using Double = Lanes<double>;

}  // namespace loco::block_sparse::portable
