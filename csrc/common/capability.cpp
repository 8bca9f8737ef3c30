#include "common/capability.h"

#include <cstring>

namespace loco {
namespace {

// Indexed by Capability.
constexpr const char* kNames[] = {"portable", "avx2", "avx512", "avx512 with bf16"};

int best() {
#ifdef LOCO_ALL_CAPABILITIES
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v4")) return __builtin_cpu_supports("avx512bf16") ? kAvx512Bf16 : kAvx512;
  if (__builtin_cpu_supports("x86-64-v3")) return kAvx2;
#endif
  return kPortable;
}

}  // namespace

std::atomic<int> current_capability{best()};

const char* const* capabilities() {
  static const struct Found {
    const char* names[kAvx512Bf16 + 2] = {};

    Found() {
      const char** next = names;
      for (int at = best(); at >= kPortable; --at) *next++ = kNames[at];
    }
  } found;
  return found.names;
}

bool use_capability(const char* name) {
  for (int at = best(); at >= kPortable; --at) {
    if (std::strcmp(kNames[at], name) == 0) return current_capability = at, true;
  }
  return false;
}

}  // namespace loco
