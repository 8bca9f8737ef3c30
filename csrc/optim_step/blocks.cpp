// The update rules of math.h, w, state <- rule(w, g, state), for a block of elements. The pointers' shapes and strides
// are given in blocks.h.
//
// Each function contains one plain loop per combination of flags, so that the compiler vectorises it without branches.
// Parameters, gradients and states never overlap; the caller has checked this. A call runs on the calling thread:
// cpu.cpp divides the work.
#include "optim_step/blocks.h"

#include <algorithm>
#include <type_traits>

namespace loco::optim_step {
LOCO_KERNELS_BEGIN

// Calls visit with the one of `values` that equals `value`, as a std::integral_constant.
template <auto... values, typename Value, typename Visit>
LOCO_HD void as_constant(Value value, const Visit& visit) {
  ((value == values ? visit(std::integral_constant<Value, values>()) : void()), ...);
}

// Calls loop(begin, end, coefficients, whether there are any) for pieces of a block, each covered by the table without
// wrapping. coefficients[i] belongs to element i.
template <Decay decay, typename T, typename Loop>
LOCO_HD void over_table(const Block<T>& block, const Loop& loop) {
  if (decay == Decay::none || block.table == nullptr) {
    return loop(int64_t{0}, block.count, block.table, std::false_type());
  }
  int64_t phase = block.phase;
  for (int64_t begin = 0; begin < block.count; phase = 0) {
    const int64_t end = std::min(block.count, begin + block.period - phase);
    loop(begin, end, block.table + phase - begin, std::true_type());
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
    T d = g[i], b = momentum == Momentum::next ? buffer[i] : T(0);
    apply_decay(decay, w[i], d, table ? c[i] : uniform);
    move_sgd(w[i], d, b, SgdFlags{decay, momentum, nesterov}, s);
    if constexpr (momentum != Momentum::none) buffer[i] = b;
  }
}

template <typename T>
void update_sgd(const Block<T>& block, SgdFlags flags, const SgdScalars<T>& scalars) {
  const SgdScalars<T> s = scalars;
  const bool nesterov = flags.nesterov && flags.momentum != Momentum::none;
  as_constant<Decay::none, Decay::l2, Decay::l1>(flags.decay, [&](auto decay) LOCO_INLINE {
    as_constant<Momentum::none, Momentum::first, Momentum::next>(flags.momentum, [&](auto momentum) LOCO_INLINE {
      as_constant<false, true>(nesterov, [&](auto nesterov) LOCO_INLINE {
        over_table<decltype(decay)::value>(block, [&](int64_t begin, int64_t end, const T* c, auto table) LOCO_INLINE {
          sgd_loop<decltype(decay)::value, decltype(momentum)::value, decltype(nesterov)::value,
                   decltype(table)::value>(block, s, begin, end, c);
        });
      });
    });
  });
}

template <Decay decay, bool amsgrad, bool metric, bool table, typename T>
LOCO_HD void adam_loop(const Block<T>& block, const AdamScalars<T>& s, int64_t begin, int64_t end, const T* c) {
  const T uniform = block.uniform;
  T *w = block.w, *m = block.state[0], *v = block.state[1], *v_max = block.state[2], *denominators = block.metric;
  const T* g = block.g;
#pragma GCC ivdep
  for (int64_t i = begin; i < end; ++i) {
    // The compiler does not know that the arrays are apart: it would read again what a reference to them has written.
    T weight = w[i], first = m[i], second = v[i], largest = amsgrad ? v_max[i] : T(0);
    const T coefficient = table ? c[i] : uniform;
    T d = g[i];
    apply_decay(decay, weight, d, coefficient);
    const T denominator = move_adam(weight, d, first, second, largest, AdamFlags{decay, amsgrad}, s);
    w[i] = weight, m[i] = first, v[i] = second;
    if constexpr (metric) denominators[i] = denominator;
    if constexpr (amsgrad) v_max[i] = largest;
  }
}

template <typename T>
void update_adam(const Block<T>& block, AdamFlags flags, const AdamScalars<T>& scalars) {
  const AdamScalars<T> s = scalars;
  as_constant<Decay::none, Decay::l2, Decay::l1, Decay::decoupled>(flags.decay, [&](auto decay) LOCO_INLINE {
    as_constant<false, true>(flags.amsgrad, [&](auto amsgrad) LOCO_INLINE {
      as_constant<false, true>(block.metric != nullptr, [&](auto metric) LOCO_INLINE {
        over_table<decltype(decay)::value>(block, [&](int64_t begin, int64_t end, const T* c, auto table) LOCO_INLINE {
          adam_loop<decltype(decay)::value, decltype(amsgrad)::value, decltype(metric)::value, decltype(table)::value>(
              block, s, begin, end, c);
        });
      });
    });
  });
}

template <typename T>
void unscale(T* g, int64_t count, T scale) {
  for (int64_t i = 0; i < count; ++i) g[i] = g[i] / scale;
}

template <typename T>
void negate(T* g, int64_t count) {
  for (int64_t i = 0; i < count; ++i) g[i] = -g[i];
}

const BlockKernels<float> float_blocks = {update_sgd, update_adam, unscale, negate};
const BlockKernels<double> double_blocks = {update_sgd, update_adam, unscale, negate};

LOCO_KERNELS_END
}  // namespace loco::optim_step
