// CUDA's device functions that need no other thread. One that is missing here is a compile error.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "block.h"

namespace cuda_on_cpu {

// A parameter that takes no part in deducing T.
template <class T>
struct Same {
  using type = T;
};
template <class T>
using SameT = typename Same<T>::type;

template <class To, class From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

// Threads change places here and where they wait: nothing can come between reading and writing.
template <class T, class Change>
T replace(T* address, Change change) {
  grid().yield();
  const T old = *address;
  *address = change(old);
  return old;
}

}  // namespace cuda_on_cpu

template <class T>
T atomicAdd(T* address, cuda_on_cpu::SameT<T> value) {
  return cuda_on_cpu::replace(address, [&](T old) { return static_cast<T>(old + value); });
}
template <class T>
T atomicSub(T* address, cuda_on_cpu::SameT<T> value) {
  return cuda_on_cpu::replace(address, [&](T old) { return static_cast<T>(old - value); });
}
template <class T>
T atomicMax(T* address, cuda_on_cpu::SameT<T> value) {
  return cuda_on_cpu::replace(address, [&](T old) { return old < value ? value : old; });
}
template <class T>
T atomicMin(T* address, cuda_on_cpu::SameT<T> value) {
  return cuda_on_cpu::replace(address, [&](T old) { return value < old ? value : old; });
}
template <class T>
T atomicOr(T* address, cuda_on_cpu::SameT<T> value) {
  return cuda_on_cpu::replace(address, [&](T old) { return old | value; });
}
template <class T>
T atomicAnd(T* address, cuda_on_cpu::SameT<T> value) {
  return cuda_on_cpu::replace(address, [&](T old) { return old & value; });
}
template <class T>
T atomicExch(T* address, cuda_on_cpu::SameT<T> value) {
  return cuda_on_cpu::replace(address, [&](T) { return value; });
}
template <class T>
T atomicCAS(T* address, cuda_on_cpu::SameT<T> expected, cuda_on_cpu::SameT<T> value) {
  return cuda_on_cpu::replace(address, [&](T old) { return old == expected ? value : old; });
}

// Cache hints.
#define CUDA_ON_CPU_LOAD(name)      \
  template <class T>                \
  inline T name(const T* address) { \
    return *address;                \
  }
#define CUDA_ON_CPU_STORE(name)                               \
  template <class T>                                          \
  inline void name(T* address, cuda_on_cpu::SameT<T> value) { \
    *address = value;                                         \
  }
CUDA_ON_CPU_LOAD(__ldg)
CUDA_ON_CPU_LOAD(__ldca)
CUDA_ON_CPU_LOAD(__ldcg)
CUDA_ON_CPU_LOAD(__ldcs)
CUDA_ON_CPU_LOAD(__ldlu)
CUDA_ON_CPU_LOAD(__ldcv)
CUDA_ON_CPU_STORE(__stwb)
CUDA_ON_CPU_STORE(__stcg)
CUDA_ON_CPU_STORE(__stcs)
CUDA_ON_CPU_STORE(__stwt)
#undef CUDA_ON_CPU_LOAD
#undef CUDA_ON_CPU_STORE

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

template <class T>
T min(T a, T b) {
  static_assert(std::is_integral_v<T>);
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  static_assert(std::is_integral_v<T>);
  return a < b ? b : a;
}

inline unsigned __float_as_uint(float x) { return cuda_on_cpu::bits_as<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return cuda_on_cpu::bits_as<float>(x); }
inline int __float_as_int(float x) { return cuda_on_cpu::bits_as<int>(x); }
inline float __int_as_float(int x) { return cuda_on_cpu::bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return cuda_on_cpu::bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return cuda_on_cpu::bits_as<double>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

// Rounded to nearest even, each by itself: -ffp-contract=off must be on.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1 / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __drcp_rn(double a) { return 1 / a; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
