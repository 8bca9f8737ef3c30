// The update rules of math.h, w, state <- rule(w, g, state), for a block of elements. The pointers' shapes and strides
// are given in blocks.h.
//
// Each function contains one plain loop per combination of flags, so that the compiler vectorises it without branches.
// Parameters, gradients and states never overlap; the caller has checked this. A call runs on the calling thread:
// cpu.cpp divides the work.
#include "optim_step/blocks.h"

#include <algorithm>

#define LOCO_RESTRICT __restrict__

namespace loco::optim_step {
LOCO_KERNELS_BEGIN

// Calls loop(begin, end, coefficients) for pieces of a block, each covered by the table without wrapping.
// coefficients[i] belongs to element i.
template <typename T, typename Loop>
LOCO_HD void over_table(const Block<T>& block, const Loop& loop) {
  int64_t phase = block.phase;
  for (int64_t begin = 0; begin < block.count; phase = 0) {
    const int64_t end = std::min(block.count, begin + block.period - phase);
    loop(begin, end, block.table + phase - begin);
    begin = end;
  }
}

template <Decay decay, Momentum momentum, bool nesterov, bool table, typename T>
LOCO_HD void sgd_loop(const Block<T>& block, const SgdScalars<T>& s, int64_t begin, int64_t end, const T* c) {
  const T uniform = block.uniform;
  T *w = block.w, *buffer = block.state[0];
  const T* g = block.g;
#pragma GCC ivdep
  for (int64_t i = begin; i < end; ++i) {
    T b = momentum == Momentum::next ? buffer[i] : T(0);
    sgd(w[i], g[i], b, table ? c[i] : uniform, SgdFlags{decay, momentum, nesterov}, s);
    if constexpr (momentum != Momentum::none) buffer[i] = b;
  }
}

template <Decay decay, Momentum momentum, bool nesterov, typename T>
LOCO_HD void sgd_table(const Block<T>& block, const SgdScalars<T>& s) {
  if (decay != Decay::none && block.table != nullptr) {
    over_table(block, [&](int64_t begin, int64_t end, const T* c)
                          LOCO_INLINE { sgd_loop<decay, momentum, nesterov, true>(block, s, begin, end, c); });
  } else {
    sgd_loop<decay, momentum, nesterov, false>(block, s, 0, block.count, static_cast<const T*>(nullptr));
  }
}

template <Decay decay, typename T>
LOCO_HD void sgd_momentum(const Block<T>& block, SgdFlags flags, const SgdScalars<T>& s) {
  if (flags.momentum == Momentum::none) return sgd_table<decay, Momentum::none, false>(block, s);
  if (flags.momentum == Momentum::first) {
    return flags.nesterov ? sgd_table<decay, Momentum::first, true>(block, s)
                          : sgd_table<decay, Momentum::first, false>(block, s);
  }
  return flags.nesterov ? sgd_table<decay, Momentum::next, true>(block, s)
                        : sgd_table<decay, Momentum::next, false>(block, s);
}

template <typename T>
LOCO_HD void sgd_decay(const Block<T>& block, SgdFlags flags, const SgdScalars<T>& s) {
  if (flags.decay == Decay::none) return sgd_momentum<Decay::none>(block, flags, s);
  if (flags.decay == Decay::l2) return sgd_momentum<Decay::l2>(block, flags, s);
  sgd_momentum<Decay::l1>(block, flags, s);
}

template <Decay decay, bool amsgrad, bool metric, bool table, typename T>
LOCO_HD void adam_loop(const Block<T>& block, const AdamScalars<T>& s, int64_t begin, int64_t end, const T* c) {
  const T uniform = block.uniform;
  T *w = block.w, *m = block.state[0], *v = block.state[1], *v_max = block.state[2], *denominators = block.metric;
  const T* g = block.g;
#pragma GCC ivdep
  for (int64_t i = begin; i < end; ++i) {
    T largest = amsgrad ? v_max[i] : T(0);
    const T denominator = adam(w[i], g[i], m[i], v[i], largest, table ? c[i] : uniform, AdamFlags{decay, amsgrad}, s);
    if constexpr (metric) denominators[i] = denominator;
    if constexpr (amsgrad) v_max[i] = largest;
  }
}

template <Decay decay, bool amsgrad, bool metric, typename T>
LOCO_HD void adam_table(const Block<T>& block, const AdamScalars<T>& s) {
  if (decay != Decay::none && block.table != nullptr) {
    over_table(block, [&](int64_t begin, int64_t end, const T* c)
                          LOCO_INLINE { adam_loop<decay, amsgrad, metric, true>(block, s, begin, end, c); });
  } else {
    adam_loop<decay, amsgrad, metric, false>(block, s, 0, block.count, static_cast<const T*>(nullptr));
  }
}

template <bool amsgrad, bool metric, typename T>
LOCO_HD void adam_decay(const Block<T>& block, Decay decay, const AdamScalars<T>& s) {
  if (decay == Decay::none) return adam_table<Decay::none, amsgrad, metric>(block, s);
  if (decay == Decay::l2) return adam_table<Decay::l2, amsgrad, metric>(block, s);
  if (decay == Decay::l1) return adam_table<Decay::l1, amsgrad, metric>(block, s);
  adam_table<Decay::decoupled, amsgrad, metric>(block, s);
}

template <typename T>
LOCO_HD void adam_flags(const Block<T>& block, AdamFlags flags, const AdamScalars<T>& s) {
  if (block.metric == nullptr) {
    return flags.amsgrad ? adam_decay<true, false>(block, flags.decay, s)
                         : adam_decay<false, false>(block, flags.decay, s);
  }
  return flags.amsgrad ? adam_decay<true, true>(block, flags.decay, s) : adam_decay<false, true>(block, flags.decay, s);
}

template <typename T>
void update_sgd(const Block<T>& block, SgdFlags flags, const SgdScalars<T>& scalars) {
  const SgdScalars<T> local = scalars;
  sgd_decay(block, flags, local);
}

template <typename T>
void update_adam(const Block<T>& block, AdamFlags flags, const AdamScalars<T>& scalars) {
  const AdamScalars<T> local = scalars;
  adam_flags(block, flags, local);
}

template <typename T>
void unscale(T* g, int64_t count, T scale) {
  for (int64_t i = 0; i < count; ++i) g[i] = g[i] / scale;
}

template <typename T>
void negate(T* g, int64_t count) {
  for (int64_t i = 0; i < count; ++i) g[i] = -g[i];
}

static void random_words(const PhiloxKey& key, const int64_t* elements, int64_t count, uint32_t* const words[4]) {
  const PhiloxKey k = key;
  uint32_t *LOCO_RESTRICT w0 = words[0], *LOCO_RESTRICT w1 = words[1];
  uint32_t *LOCO_RESTRICT w2 = words[2], *LOCO_RESTRICT w3 = words[3];
  for (int64_t i = 0; i < count; ++i) {
    uint32_t out[4];
    philox(k, static_cast<uint64_t>(elements[i]), out);
    w0[i] = out[0], w1[i] = out[1], w2[i] = out[2], w3[i] = out[3];
  }
}

static void store_stochastic(const float* LOCO_RESTRICT from, const uint32_t* LOCO_RESTRICT random,
                             uint16_t* LOCO_RESTRICT to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = float_to_bf16_stochastic(from[i], random[i]);
}

const BlockKernels<float> float_blocks = {update_sgd, update_adam, unscale, negate};
const BlockKernels<double> double_blocks = {update_sgd, update_adam, unscale, negate};
const RandomKernels random_kernels = {random_words, store_stochastic};

LOCO_KERNELS_END
}  // namespace loco::optim_step
