// The four element types, and exact conversions between them and the compute dtypes (float, double). bfloat16 and
// float16 values are stored as bit patterns. Every function rounds to nearest even and preserves NaN and infinity.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/platform.h"

namespace loco {

enum class DType : uint8_t { f64, f32, bf16, f16 };

LOCO_HD int64_t element_size(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

LOCO_HD uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

LOCO_HD float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

LOCO_HD float bf16_to_float(uint16_t half) { return from_bits(static_cast<uint32_t>(half) << 16); }

LOCO_HD bool is_nan_bits(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

// GPUs have instructions for these conversions, which differ only in the payload of NaN.

LOCO_HD uint16_t float_to_bf16(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint16_t half;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
#else
  const uint32_t bits = to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>(is_nan_bits(bits) ? nan : rounded);
#endif
}

LOCO_HD float f16_to_float(uint16_t half) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
#else
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  // Exponents are re-biased by 127 - 15 = 112. Infinity and NaN need that offset twice.
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = normal + (112u << 23);
  const uint32_t subnormal = to_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t finite = magnitude < 0x400u ? subnormal : normal;
  return from_bits(sign | (magnitude >= 0x7c00u ? special : finite));
#endif
}

LOCO_HD uint16_t float_to_f16(float value) {
#if defined(__CUDA_ARCH__)
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
#else
  const uint32_t bits = to_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  // Below 2^-14, float16 values are spaced like floats just above 0.5, so the addition does the rounding.
  const uint32_t subnormal = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  // 65520 and above round to infinity.
  return static_cast<uint16_t>(sign | (magnitude >= 0x477ff000u ? special : finite));
#endif
}

// The type in which elements are stored.
template <DType dtype>
using Stored =
    std::conditional_t<dtype == DType::f64, double, std::conditional_t<dtype == DType::f32, float, uint16_t>>;

template <DType dtype, typename T>
LOCO_HD T widened(Stored<dtype> value) {
  if constexpr (dtype == DType::bf16) {
    return static_cast<T>(bf16_to_float(value));
  } else if constexpr (dtype == DType::f16) {
    return static_cast<T>(f16_to_float(value));
  } else {
    return static_cast<T>(value);
  }
}

template <DType dtype, typename T>
LOCO_HD Stored<dtype> narrowed(T value) {
  if constexpr (dtype == DType::bf16) {
    return float_to_bf16(static_cast<float>(value));
  } else if constexpr (dtype == DType::f16) {
    return float_to_f16(static_cast<float>(value));
  } else {
    return static_cast<Stored<dtype>>(value);
  }
}

// Calls visit with the dtype as a std::integral_constant, and returns its result.
template <class Visit>
LOCO_HD auto with_dtype(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::f64:
      return visit(std::integral_constant<DType, DType::f64>());
    case DType::f32:
      return visit(std::integral_constant<DType, DType::f32>());
    case DType::bf16:
      return visit(std::integral_constant<DType, DType::bf16>());
    default:
      return visit(std::integral_constant<DType, DType::f16>());
  }
}

}  // namespace loco
