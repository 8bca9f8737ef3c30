// Memory that is about to be written for the first time.
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace loco {

// Asks for large pages, where a range has room for several: the system hands them out, zeroed, with a few faults
// instead of one for every 4 KiB. Only whole large pages are asked for, so that no memory is added.
inline void expect_writes(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 2 << 20;
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage, end = (address + bytes) / kPage * kPage;
  if (end > begin + kPage) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace loco
