// Prepares memory that is about to be written for the first time.
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace loco {

// Requests huge pages for a range with room for several, so that the system provides zeroed memory with a few page
// faults instead of one for every 4 KiB. The system uses a huge page only if it is within the requested range, so no
// memory is added. A request that it cannot fulfil has no effect.
inline void expect_writes(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr int64_t kHugePage = 2 << 20;
  if (bytes < 2 * kHugePage) return;
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = address / page * page, end = (address + bytes) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace loco
