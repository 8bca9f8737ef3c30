// Macros that let the same source compile with several compilers and for several instruction sets.
#pragma once

#if defined(__CUDACC__)
#define LOCO_HD __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define LOCO_HD inline __attribute__((always_inline))
#else
#define LOCO_HD inline
#endif

// Marks device functions: values stay in registers only if everything is inlined.
#define LOCO_DEVICE __device__ __forceinline__

// Precedes a loop of scalar code, which unrolling only makes longer: a kernel has many of them.
#if defined(__CUDACC__)
#define LOCO_NO_UNROLL _Pragma("unroll 1")
#else
#define LOCO_NO_UNROLL
#endif

// Marks lambdas, which cannot carry LOCO_HD.
#if defined(__GNUC__)
#define LOCO_INLINE __attribute__((always_inline))
#else
#define LOCO_INLINE
#endif
