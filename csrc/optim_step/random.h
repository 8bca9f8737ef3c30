// Loops over elements that draw random bits and round stochastically, compiled for several instruction sets.
#pragma once

#include <cstdint>

#include "common/capability.h"
#include "optim_step/math.h"

namespace loco::optim_step {

struct RandomKernels {
  // Writes four random words per element, one to each array of `words` (each [count]). elements: [count], the elements'
  // logical indices.
  void (*random_words)(const PhiloxKey& key, const int64_t* elements, int64_t count, uint32_t* const words[4]);
  // Rounds floats to bfloat16 stochastically. from, random, to: [count], contiguous.
  void (*store_stochastic)(const float* from, const uint32_t* random, uint16_t* to, int64_t count);
};

LOCO_TABLE(avx512, RandomKernels, random_kernels)

}  // namespace loco::optim_step
