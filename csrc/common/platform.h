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

// Marks lambdas, which cannot carry LOCO_HD.
#if defined(__GNUC__)
#define LOCO_INLINE __attribute__((always_inline))
#else
#define LOCO_INLINE
#endif

// Compiles one clone of a function per x86-64 level; the loader chooses one when the library is loaded. Everything that
// the function calls must be LOCO_HD, so that it is inlined and compiled for that level too.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define LOCO_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LOCO_CLONES
#endif

// Defined where a pragma can set the x86-64 level that a file is compiled for.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define LOCO_X86_LEVELS
#endif
