// Copies a block of an operand to contiguous memory in the compute dtype, and back.
//
// An operand that is flat and already of that dtype is used in place. Any other is gathered and converted into a buffer
// that fits in the first-level cache, and scattered back after the update.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/convert.h"
#include "optim_step/blocks.h"
#include "optim_step/cpu.h"

namespace loco::optim_step {

constexpr int64_t kBlock = 1024;  // elements of a staged block

struct alignas(64) RawBlock {
  unsigned char bytes[kBlock * 8];
};

// Reads elements begin .. begin + count - 1 of the operand into `block`, [count]. count is at most kBlock.
template <typename T>
void stage_in(const Operand& operand, int64_t begin, int64_t count, T* block, RawBlock& raw) {
  if (operand.flat()) return load(operand.dtype, element(operand, begin), block, count);
  copy_block<false>(operand, begin, count, raw.bytes);
  load(operand.dtype, raw.bytes, block, count);
}

// Writes `block`, [count], back to the operand. random: [count], words for stochastic rounding to bfloat16, or null.
template <typename T>
void stage_out(const Operand& operand, int64_t begin, int64_t count, const T* block, const uint32_t* random,
               RawBlock& raw) {
  void* out = operand.flat() ? static_cast<void*>(element(operand, begin)) : raw.bytes;
  bool stored = false;
  if constexpr (std::is_same_v<T, float>) {
    if (random != nullptr && operand.dtype == DType::bf16) {
      random_kernels().store_stochastic(block, random, static_cast<uint16_t*>(out), count);
      stored = true;
    }
  }
  if (!stored) store(operand.dtype, block, out, count);
  if (!operand.flat()) copy_block<true>(operand, begin, count, raw.bytes);
}

}  // namespace loco::optim_step
