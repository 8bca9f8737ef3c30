// Quotients and roots of float32 for many elements, correctly rounded: the steps of CUDA's own operators, without their
// branch for each element.
//
// An operator begins with the instruction's approximation and corrects it with fused multiply-adds, which is right as
// long as nothing on the way underflows or overflows; elsewhere it branches. Here the caller finds out whether all of
// its elements are within the range where that holds, and branches once.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/mistake.h"
#include "common/platform.h"
#include "optim_step/math.h"

namespace loco::optim_step {

// Returns 1 / x, within the last two bits.
LOCO_DEVICE float approximate_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1 / x;
#endif
}

// Returns 1 / sqrt(x), within the last two bits.
LOCO_DEVICE float approximate_inverse_root(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return static_cast<float>(1 / std::sqrt(static_cast<double>(x)));
#endif
}

LOCO_DEVICE float corrected_reciprocal(float x) {
  const float y = approximate_reciprocal(x);
  return std::fma(y, std::fma(-x, y, 1.0f), y);
}

// Returns a / b. reciprocal: corrected_reciprocal(b).
LOCO_DEVICE float quotient(float a, float b, float reciprocal) {
  const float q = a * reciprocal;
  return std::fma(reciprocal, std::fma(-b, q, a), q);
}

LOCO_DEVICE float root(float x) {
  const float y = approximate_inverse_root(x), r = x * y;
  return std::fma(std::fma(-r, r, x), y * 0.5f, r);
}

// Computes how far Adam moves weights, -lr / (1-b1^t) * m / (sqrt(v/(1-b2^t)) + eps), for one entry.
//
// In the range that it covers, 2^-50 <= sqrt(v) <= 2^30 and the denominator is at most 2^41, so that no quotient lies
// beyond 2^-111 .. 2^110, and every remainder is a multiple of a float.
class AdamMoves {
 public:
  LOCO_DEVICE explicit AdamMoves(const AdamScalars<float>& s)
      : reciprocal_(corrected_reciprocal(s.bias_correction2_sqrt)) {
    covers_ = s.bias_correction2_sqrt >= 0x1p-10f && s.bias_correction2_sqrt <= 1 && s.eps >= 0 && s.eps <= 0x1p40f;
  }

  LOCO_DEVICE bool covers() const { return covers_; }

  // Returns the move, and makes `covered` false if that is outside of the range. second: what v is here, or its
  // maximum.
  LOCO_DEVICE float operator()(float m, float second, const AdamScalars<float>& s, bool& covered) const {
    const float denominator = quotient(root(second), s.bias_correction2_sqrt, reciprocal_) + s.eps;
    const float numerator = s.negative_step_size * m, size = std::fabs(numerator);
    covered = covered && second >= 0x1p-100f;
    covered = covered && second <= 0x1p60f;
    covered = covered && size >= (LOCO_MISTAKE(step_range) ? 0 : 0x1p-70f);
    covered = covered && size <= 0x1p60f;
    return quotient(numerator, denominator, corrected_reciprocal(denominator));
  }

 private:
  float reciprocal_;
  bool covers_;
};

}  // namespace loco::optim_step
