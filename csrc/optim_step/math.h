// The update rules of SGD, Adam and AdamW for one weight, and the random bits of stochastic rounding.
//
// d = gradient with its decay      l2: g + c*w      l1: g + c*sign(w)      decoupled: w <- c*w, d = g
// SGD   b = d at the first step, then mu*b + (1 - dampening)*d;  w <- w - lr*(nesterov ? d + mu*b : b)
// Adam  m <- m + (1-b1)(d - m);  v <- b2*v + (1-b2)*d*d;  w <- w - lr/(1-b1^t) * m / (sqrt(v/(1-b2^t)) + eps)
//
// c is weight_decay times the decay map at the weight's position (l2, l1), or 1 - lr*weight_decay*map (decoupled).
// Operations are in the order of torch.optim's for-loop. Only the std::fma calls are fused (contraction is disabled
// when compiling), so every backend gives the same bits.
//
// Every function works on one element: references are to scalars, and philox's out is [4]. How elements are divided
// among threads is up to the callers (blocks.cpp, cuda.cu).
#pragma once

#include <cmath>
#include <cstdint>

#include "common/dtype.h"
#include "common/platform.h"

namespace loco::optim_step {

enum class Decay : uint8_t { none, l2, l1, decoupled };
enum class Momentum : uint8_t { none, first, next };

// Flags are compile-time constants in the loops on the CPU, and uniform across a block on a GPU.
struct SgdFlags {
  Decay decay;
  Momentum momentum;
  bool nesterov;

  // Returns whether the step reads or writes a state.
  LOCO_HD bool uses(int state) const { return state == 0 && momentum != Momentum::none; }
};

struct AdamFlags {
  Decay decay;
  bool amsgrad;

  LOCO_HD bool uses(int state) const { return state < 2 || amsgrad; }
};

template <typename T>
struct SgdScalars {
  T lr, momentum, undamped;  // undamped = 1 - dampening
};

template <typename T>
struct AdamScalars {
  T lerp_weight;  // 1 - beta1, minus 1 if lerp_from_end
  T beta2, one_minus_beta2, eps;
  T negative_step_size;     // -lr / (1 - beta1^t)
  T bias_correction2_sqrt;  // sqrt(1 - beta2^t)
  bool lerp_from_end;       // use torch.lerp's second form, for 1 - beta1 >= 0.5
};

// Applies the decay: g becomes d, and w is multiplied by c if the decay is decoupled.
template <typename T>
LOCO_HD void apply_decay(Decay decay, T& w, T& g, T c) {
  if (decay == Decay::l2) g = std::fma(c, w, g);
  if (decay == Decay::l1) g = g + c * static_cast<T>((w > T(0)) - (w < T(0)));
  if (decay == Decay::decoupled) w = w * c;
}

// Updates w and the momentum buffer after the decay. Without momentum the buffer is neither read nor written; the first
// step does not read it.
template <typename T>
LOCO_HD void move_sgd(T& w, T d, T& buffer, SgdFlags f, const SgdScalars<T>& s) {
  if (f.momentum != Momentum::none) {
    const T b = f.momentum == Momentum::first ? d : std::fma(s.undamped, d, buffer * s.momentum);
    buffer = b;
    d = f.nesterov ? std::fma(s.momentum, b, d) : b;
  }
  w = std::fma(-s.lr, d, w);
}

// Updates m and v after the decay.
template <typename T>
LOCO_HD void update_moments(T d, T& m, T& v, bool lerp_from_end, const AdamScalars<T>& s) {
  const T gap = d - m;
  m = std::fma(s.lerp_weight, gap, lerp_from_end ? d : m);
  v = std::fma(s.one_minus_beta2 * d, d, v * s.beta2);
}

// Returns the larger of v and v_max. NaN wins, as in torch.maximum.
template <typename T>
LOCO_HD T larger(T v, T v_max) {
  return (v > v_max || v != v) ? v : v_max;
}

// Returns what m is divided by. second: v, or the largest v with amsgrad.
template <typename T>
LOCO_HD T adam_denominator(T second, const AdamScalars<T>& s) {
  return std::sqrt(second) / s.bias_correction2_sqrt + s.eps;
}

// Updates w, m, v and v_max after the decay; v_max is neither read nor written without amsgrad. Returns the denominator
// of m.
template <typename T>
LOCO_HD T move_adam(T& w, T d, T& m, T& v, T& v_max, AdamFlags f, const AdamScalars<T>& s) {
  update_moments(d, m, v, s.lerp_from_end, s);
  if (f.amsgrad) v_max = larger(v, v_max);
  const T denominator = adam_denominator(f.amsgrad ? v_max : v, s);
  w = w + s.negative_step_size * m / denominator;
  return denominator;
}

// The random number generator Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
struct PhiloxKey {
  uint32_t seed_low, seed_high;
  uint32_t tensor, step;  // upper half of the counter
};

// Writes the four random words of an element; it is the lower half of the counter.
LOCO_HD void philox(const PhiloxKey& key, uint64_t element, uint32_t out[4]) {
  uint32_t c0 = static_cast<uint32_t>(element), c1 = static_cast<uint32_t>(element >> 32);
  uint32_t c2 = key.tensor, c3 = key.step, k0 = key.seed_low, k1 = key.seed_high;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(c0) * 0xD2511F53u;
    const uint64_t product1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// Rounds away from zero with a probability equal to the fraction that bfloat16 drops. Infinity and NaN are preserved.
LOCO_HD uint16_t float_to_bf16_stochastic(float value, uint32_t random) {
  const uint32_t bits = to_bits(value);
  const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  return finite ? static_cast<uint16_t>((bits + (random & 0xffffu)) >> 16) : float_to_bf16(value);
}

}  // namespace loco::optim_step
