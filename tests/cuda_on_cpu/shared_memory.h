// The shared memory of blocks: their static __shared__ variables and the dynamic memory that a launch asks for.
#pragma once

#include <link.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "fiber.h"

namespace cuda_on_cpu {

constexpr int64_t kMostShared = 48 << 10;

// The running thread's instances of all thread-local variables of this program or library: its __shared__ variables.
struct SharedVariables {
  unsigned char* begin = nullptr;
  size_t size = 0;

  void poison() const {
    if (size > 0) std::memset(begin, 0xff, size);
  }

  // Returns at least the number of bytes that the last block has written to. Long stretches are mostly untouched.
  int64_t used() const {
    static const std::vector<unsigned char> untouched(256, 0xff);
    int64_t bytes = 0;
    for (size_t at = 0; at < size; at += untouched.size()) {
      const size_t length = std::min(untouched.size(), size - at);
      if (std::memcmp(begin + at, untouched.data(), length) == 0) continue;
      bytes += length - std::count(begin + at, begin + at + length, untouched[0]);
    }
    return bytes;
  }
};

#if defined(__SANITIZE_ADDRESS__)
inline SharedVariables shared_variables() { return {}; }
#else
inline thread_local unsigned char shared_marker = 0;

inline SharedVariables shared_variables() {
  SharedVariables found;
  const auto look = [](dl_phdr_info* info, size_t, void* result) {
    auto* memory = static_cast<unsigned char*>(info->dlpi_tls_data);
    for (int i = 0; memory != nullptr && i < info->dlpi_phnum; ++i) {
      const size_t size = info->dlpi_phdr[i].p_memsz;
      if (info->dlpi_phdr[i].p_type != PT_TLS || &shared_marker < memory || &shared_marker >= memory + size) continue;
      *static_cast<SharedVariables*>(result) = {memory, size};
    }
    return 0;
  };
  shared_marker = 0;  // the first access makes this thread's instances
  dl_iterate_phdr(look, &found);
  if (found.size == 0) fail("shared memory not found");
  return found;
}
#endif

// Dynamic shared memory of the running block, beside its __shared__ variables.
inline unsigned char* requested_memory = nullptr;

// The shared memory of resident blocks. One of them has it in place, where its threads find it.
class SharedMemory {
 public:
  // bytes: of dynamic shared memory
  SharedMemory(const char* kernel, size_t bytes, int residents)
      : kernel_(kernel), bytes_(bytes), variables_(shared_variables()) {
    for (int i = 0; i < residents; ++i) {
      residents_.push_back({std::make_unique<unsigned char[]>(bytes), {}});  // a sanitizer sees accesses beside it
    }
  }

  // Puts memory that nothing has been written to in place, for a block that begins.
  void begin(int resident) {
    variables_.poison();
    requested_memory = residents_[resident].requested.get();
    if (bytes_ > 0) std::memset(requested_memory, 0xff, bytes_);
  }

  void take_away(int resident) {
    residents_[resident].variables.assign(variables_.begin, variables_.begin + variables_.size);
  }

  void put_back(int resident) {
    const Copy& copy = residents_[resident];
    if (variables_.size > 0) std::memcpy(variables_.begin, copy.variables.data(), copy.variables.size());
    requested_memory = copy.requested.get();
  }

  void end() const {
    const int64_t used = variables_.used() + static_cast<int64_t>(bytes_);
    if (used > kMostShared) fail("%s: more than %ld bytes of shared memory", kernel_, kMostShared);
  }

 private:
  struct Copy {
    std::unique_ptr<unsigned char[]> requested;
    std::vector<unsigned char> variables;
  };

  const char* kernel_;
  size_t bytes_;
  SharedVariables variables_;
  std::vector<Copy> residents_;
};

}  // namespace cuda_on_cpu
