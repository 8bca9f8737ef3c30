// Copies elements of an operand to contiguous memory in the compute dtype T, and back.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/convert.h"
#include "common/operand.h"

namespace loco {

constexpr int64_t kBlock = 1024;  // elements of a block that fits in the first-level cache

// Calls visit(memory, position, count) for pieces of elements begin .. begin + count - 1 of the operand, of at most
// kBlock elements if it is not flat. The memory is contiguous: the operand's own or that of a copy, which is written
// back after the visit if to_memory, and read before it otherwise.
template <bool to_memory, typename Visit>
void for_blocks(const Operand& operand, int64_t begin, int64_t count, const Visit& visit) {
  if (operand.flat()) return visit(element(operand, begin), int64_t{0}, count);
  alignas(64) unsigned char raw[kBlock * sizeof(double)];
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t some = std::min(kBlock, count - at);
    if (!to_memory) copy_block<false>(operand, begin + at, some, raw);
    visit(raw, at, some);
    if (to_memory) copy_block<true>(operand, begin + at, some, raw);
  }
}

// Reads elements begin .. begin + count - 1 of the operand into `block`, [count].
template <typename T>
void stage_in(const Operand& operand, int64_t begin, int64_t count, T* block) {
  for_blocks<false>(operand, begin, count,
                    [&](const void* from, int64_t at, int64_t some) { load(operand.dtype, from, block + at, some); });
}

// Writes `block`, [count], back to the operand.
template <typename T>
void stage_out(const Operand& operand, int64_t begin, int64_t count, const T* block) {
  for_blocks<true>(operand, begin, count,
                   [&](void* to, int64_t at, int64_t some) { store(operand.dtype, block + at, to, some); });
}

}  // namespace loco
