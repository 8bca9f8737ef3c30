// Memory that is about to be written for the first time.
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace loco {

// Asks for huge pages, where a range has room for several: the system hands them out, zeroed, with a few faults
// instead of one for every 4 KiB. The system uses a huge page only where it lies within what was asked for, so that no
// memory is added; advice that it cannot take changes nothing.
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
