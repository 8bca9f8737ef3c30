// The random bits of stochastic rounding, and the rounding, for many elements (for one: math.h).
#include "optim_step/random.h"

namespace loco::optim_step {
LOCO_KERNELS_BEGIN

static void random_words(const PhiloxKey& key, const int64_t* elements, int64_t count, uint32_t* const words[4]) {
  const PhiloxKey k = key;
  uint32_t* __restrict__ w0 = words[0], * __restrict__ w1 = words[1];
  uint32_t* __restrict__ w2 = words[2], * __restrict__ w3 = words[3];
  for (int64_t i = 0; i < count; ++i) {
    uint32_t out[4];
    philox(k, static_cast<uint64_t>(elements[i]), out);
    w0[i] = out[0], w1[i] = out[1], w2[i] = out[2], w3[i] = out[3];
  }
}

static void store_stochastic(const float* __restrict__ from, const uint32_t* __restrict__ random,
                             uint16_t* __restrict__ to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = float_to_bf16_stochastic(from[i], random[i]);
}

const RandomKernels random_kernels = {random_words, store_stochastic};

LOCO_KERNELS_END
}  // namespace loco::optim_step
