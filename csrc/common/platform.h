// Macros that let one source serve several compilers and instruction sets.
#pragma once

#if defined(__CUDACC__)
#define LOCO_HD __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define LOCO_HD inline __attribute__((always_inline))
#else
#define LOCO_HD inline
#endif

// For functions of kernels: values stay in registers only where everything is inlined.
#define LOCO_DEVICE __device__ __forceinline__

// For lambdas, which cannot carry LOCO_HD.
#if defined(__GNUC__)
#define LOCO_INLINE __attribute__((always_inline))
#else
#define LOCO_INLINE
#endif

// One copy of a function per x86-64 level, chosen when the library is loaded. Everything it calls must be LOCO_HD, so
// that it is inlined and compiled for that level too.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define LOCO_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LOCO_CLONES
#endif

// Where files can be compiled for one x86-64 level each, by a pragma.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define LOCO_X86_LEVELS
#endif
