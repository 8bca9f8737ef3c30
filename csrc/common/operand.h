// Describes where a tensor's elements are, and copies them to contiguous memory and back.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/dtype.h"
#include "common/strided.h"

namespace loco {

// Element i is at data + offset(i), in elements, where offset is the nest's, or i if the operand is flat.
struct Operand {
  void* data;  // null: absent
  DType dtype;
  const Nest* nest;  // null: flat

  bool flat() const { return nest == nullptr; }
};

template <typename T>
constexpr DType dtype_of = std::is_same_v<T, double> ? DType::f64 : DType::f32;

// Returns whether the operand can be used in place: it is flat and of type T.
template <typename T>
inline bool in_place(const Operand& operand) {
  return operand.dtype == dtype_of<T> && operand.flat();
}

inline char* element(const Operand& operand, int64_t offset) {
  return static_cast<char*>(operand.data) + offset * element_size(operand.dtype);
}

// Copies elements begin .. begin + count - 1 of the operand to `block`, or from it if to_memory. block: [count],
// contiguous.
template <typename Bits, bool to_memory>
void copy_runs(const Operand& operand, int64_t begin, int64_t count, Bits* block) {
  Bits* memory = static_cast<Bits*>(operand.data);
  for_runs(*operand.nest, begin, count, [&](int64_t position, int64_t offset, int64_t stride, int64_t run) {
    for (int64_t i = 0; i < run; ++i) {
      if (to_memory) {
        memory[offset + i * stride] = block[position + i];
      } else {
        block[position + i] = memory[offset + i * stride];
      }
    }
  });
}

// Copies like copy_runs, for an operand of any dtype. The bits are copied without conversion.
template <bool to_memory>
void copy_block(const Operand& operand, int64_t begin, int64_t count, void* block) {
  switch (element_size(operand.dtype)) {
    case 8:
      return copy_runs<uint64_t, to_memory>(operand, begin, count, static_cast<uint64_t*>(block));
    case 4:
      return copy_runs<uint32_t, to_memory>(operand, begin, count, static_cast<uint32_t*>(block));
    default:
      return copy_runs<uint16_t, to_memory>(operand, begin, count, static_cast<uint16_t*>(block));
  }
}

}  // namespace loco
