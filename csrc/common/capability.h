// Functions that are compiled for several instruction sets, and the choice among them.
//
// setup.py compiles the sources in its CAPABILITY_SOURCES several times: as they are, for any CPU, and with LOCO_AVX2,
// LOCO_AVX512 or LOCO_AVX512_BF16 defined. In such a source, and in headers that only such sources include, everything
// stands between LOCO_KERNELS_BEGIN and LOCO_KERNELS_END: in a namespace of the instruction set, and compiled for it.
// The source ends with a table of its functions, which LOCO_TABLE declares to their callers.
#pragma once

#include <atomic>

#include "common/platform.h"

#if defined(LOCO_AVX512_BF16)
#define LOCO_CAPABILITY avx512_bf16
#define LOCO_TARGET LOCO_COMPILED_FOR("GCC target(\"arch=x86-64-v4,avx512bf16,prefer-vector-width=512\")")
#elif defined(LOCO_AVX512)
#define LOCO_CAPABILITY avx512
#define LOCO_TARGET LOCO_COMPILED_FOR("GCC target(\"arch=x86-64-v4,prefer-vector-width=512\")")
#elif defined(LOCO_AVX2)
#define LOCO_CAPABILITY avx2
#define LOCO_TARGET LOCO_COMPILED_FOR("GCC target(\"arch=x86-64-v3\")")
#else
#define LOCO_CAPABILITY portable
#define LOCO_TARGET
#endif

#ifdef __clang__  // has no pragma that sets the target: all namespaces get portable code, and only one is used
#undef LOCO_ALL_CAPABILITIES
#undef LOCO_AVX512_BF16
#undef LOCO_AVX512
#undef LOCO_AVX2
#define LOCO_COMPILED_FOR(target)
#else
#define LOCO_COMPILED_FOR(target) _Pragma(target)
#endif

// The pragma of the target comes last: GCC 16 drops what follows it in the expansion of a macro.
#define LOCO_KERNELS_BEGIN                                          \
  LOCO_COMPILED_FOR("GCC push_options") namespace LOCO_CAPABILITY { \
    using namespace ::loco::LOCO_CAPABILITY;                        \
    LOCO_TARGET
#define LOCO_KERNELS_END \
  }                      \
  LOCO_COMPILED_FOR("GCC pop_options")

namespace loco {

namespace LOCO_CAPABILITY {}

enum Capability : int { kPortable, kAvx2, kAvx512, kAvx512Bf16 };

extern std::atomic<int> current_capability;

// Returns the instruction set in use: the best one of this machine, unless use_capability has chosen another.
inline Capability capability() { return static_cast<Capability>(current_capability.load(std::memory_order_relaxed)); }

// Returns the names of the instruction sets that this machine has, best first, ending with null.
const char* const* capabilities();

// Uses one of capabilities(), by name, from now on. Returns false if there is no such name.
bool use_capability(const char* name);

}  // namespace loco

// Declares `extern const Table name` in the namespace of each instruction set, and a function name() that returns the
// table of the one in use. widest: the last of avx2 and avx512 that the source is compiled for.
#ifdef LOCO_ALL_CAPABILITIES
#define LOCO_TABLE(widest, Table, name)                                                                 \
  namespace portable {                                                                                  \
  extern const Table name;                                                                              \
  }                                                                                                     \
  namespace avx2 {                                                                                      \
  extern const Table name;                                                                              \
  }                                                                                                     \
  namespace avx512 {                                                                                    \
  extern const Table name;                                                                              \
  }                                                                                                     \
  inline const Table& name() {                                                                          \
    static constexpr const Table* all[] = {&portable::name, &avx2::name, &widest::name, &widest::name}; \
    return *all[capability()];                                                                          \
  }
#else
#define LOCO_TABLE(widest, Table, name) \
  namespace portable {                  \
  extern const Table name;              \
  }                                     \
  inline const Table& name() { return portable::name; }
#endif

// Likewise for the tables float_name and double_name of types Table<float> and Table<double>, and a function name<T>().
#define LOCO_TABLES(widest, Table, name)           \
  LOCO_TABLE(widest, Table<float>, float_##name)   \
  LOCO_TABLE(widest, Table<double>, double_##name) \
  template <typename T>                            \
  const Table<T>& name() {                         \
    if constexpr (sizeof(T) == sizeof(float))      \
      return float_##name();                       \
    else                                           \
      return double_##name();                      \
  }
