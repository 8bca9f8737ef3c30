// Launching a kernel: limits, the stream, the order of blocks and threads, shared memory.
#pragma once

#include <cuda_runtime.h>
#include <link.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <type_traits>
#include <vector>

#include "block.h"
#include "devices.h"
#include "intrinsics.h"

// These macros have the contracts of those in common/launch.h.
#define LOCO_LAUNCH(kernel, blocks, threads, ...) LOCO_LAUNCH_SHARED(kernel, blocks, threads, 0, __VA_ARGS__)
#define LOCO_LAUNCH_SHARED(kernel, blocks, threads, bytes, ...) \
  ::cuda_on_cpu::launch(#kernel, kernel, blocks, threads, bytes, __VA_ARGS__)
#define LOCO_LAUNCH_TOGETHER(kernel, blocks, threads, bytes, ...) \
  ::cuda_on_cpu::launch(#kernel, kernel, ::cuda_on_cpu::together(blocks), threads, bytes, __VA_ARGS__)
#define LOCO_SHARED(name) unsigned char* const name = ::cuda_on_cpu::requested_memory

namespace cuda_on_cpu {

constexpr int64_t kMostShared = 48 << 10;
constexpr size_t kMostParameters = 32764;

inline cudaError_t last_error = cudaSuccess;
inline int64_t launches = 0;  // since the start, refused ones left out

inline Order parse_order(const char* text) {
  if (text == nullptr || std::strcmp(text, "forward") == 0) return {Order::forward, 0};
  if (std::strcmp(text, "reverse") == 0) return {Order::reverse, 0};
  if (std::strcmp(text, "eager") == 0) return {Order::eager, 0};
  char* end = nullptr;
  const uint64_t seed = std::strtoull(text, &end, 10);
  if (end == text || *end != '\0')
    fail("CUDA_ON_CPU_ORDER: expected forward, reverse, eager or a number, got %s", text);
  return {Order::shuffled, seed};
}

inline Order& order() {
  static Order chosen = parse_order(std::getenv("CUDA_ON_CPU_ORDER"));
  return chosen;
}

inline void set_order(const char* text) { order() = parse_order(text); }

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

// The extent of a grid or a block; every number is checked before it is narrowed to 32 bits.
struct Extent {
  dim3 size;
  bool fits = true;

  template <class Int, std::enable_if_t<std::is_integral_v<Int>, bool> = true>
  Extent(Int n) : size(static_cast<unsigned>(n)), fits(n >= 1 && static_cast<uint64_t>(n) <= UINT32_MAX) {}
  Extent(dim3 size) : size(size) {}

  bool within(uint64_t x, uint64_t y, uint64_t z) const {
    const auto in = [](uint64_t n, uint64_t most) { return n >= 1 && n <= most; };
    return fits && in(size.x, x) && in(size.y, y) && in(size.z, z);
  }
  uint64_t count() const { return uint64_t{size.x} * size.y * size.z; }
};

template <class... Params>
constexpr size_t parameter_bytes() {
  size_t at = 0;
  ((at = (at + alignof(Params) - 1) / alignof(Params) * alignof(Params) + sizeof(Params)), ...);
  return at;
}

// Dynamic shared memory of the running block, beside its __shared__ variables.
inline unsigned char* requested_memory = nullptr;

class SharedMemoryOfGrid : public SharedMemory {
 public:
  // bytes: of dynamic shared memory
  SharedMemoryOfGrid(const char* kernel, size_t bytes, int residents)
      : kernel_(kernel), bytes_(bytes), variables_(shared_variables()) {
    for (int i = 0; i < residents; ++i) {
      residents_.push_back({std::make_unique<unsigned char[]>(bytes), {}});  // a sanitizer sees accesses beside it
    }
  }

  // Blocks whose __shared__ variables cannot be told from other variables run one after the other.
  static int most_residents() { return order().kind == Order::shuffled && shared_variables().size > 0 ? 3 : 1; }

  void begin(int resident) override {
    variables_.poison();
    requested_memory = residents_[resident].requested.get();
    if (bytes_ > 0) std::memset(requested_memory, 0xff, bytes_);
  }

  void take_away(int resident) override {
    residents_[resident].variables.assign(variables_.begin, variables_.begin + variables_.size);
  }

  void put_back(int resident) override {
    const Copy& copy = residents_[resident];
    if (variables_.size > 0) std::memcpy(variables_.begin, copy.variables.data(), copy.variables.size());
    requested_memory = copy.requested.get();
  }

  void end(int) override {
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

// Returns how many of these blocks run at the same time.
inline unsigned together(unsigned blocks) {
  return std::min(blocks, static_cast<unsigned>(SharedMemoryOfGrid::most_residents()));
}

// Returns the numbers of a grid's blocks in the order in which they begin.
inline std::vector<uint64_t> blocks_in_order(uint64_t count) {
  const char* const last = std::getenv("CUDA_ON_CPU_LAST_BLOCKS");
  const uint64_t first = last != nullptr ? count - std::min(count, uint64_t{std::strtoull(last, nullptr, 10)}) : 0;
  std::vector<uint64_t> blocks(count - first);
  std::iota(blocks.begin(), blocks.end(), first);
  if (order().kind == Order::reverse) std::reverse(blocks.begin(), blocks.end());
  if (order().kind != Order::shuffled) return blocks;
  for (uint64_t i = blocks.size(); i > 1; --i) std::swap(blocks[i - 1], blocks[order().random() % i]);
  return blocks;
}

inline void run_grid(const char* kernel, const Extent& blocks, const Extent& threads, size_t bytes, const void* stream,
                     Grid::Body body, void* context) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  check_stream(kernel, stream);
  if (!blocks.within(INT32_MAX, 65535, 65535) || !threads.within(1024, 1024, 64) || threads.count() > 1024) {
    std::fprintf(stderr, "cuda_on_cpu: %s: launch of %u x %u x %u blocks of %u x %u x %u threads is refused\n", kernel,
                 blocks.size.x, blocks.size.y, blocks.size.z, threads.size.x, threads.size.y, threads.size.z);
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  if (is_missing(kernel)) {
    last_error = cudaErrorNoKernelImageForDevice;
    return;
  }
  ++launches;
  gridDim = blocks.size;
  blockDim = threads.size;
  const int most = SharedMemoryOfGrid::most_residents();
  SharedMemoryOfGrid shared(kernel, bytes, most);
  const OnDevice on_device;
  grid().run(kernel, blocks_in_order(blocks.count()), most, static_cast<int>(threads.count()), body, context, order(),
             shared);
}

// Arguments are converted and copied at the launch, and once more for each thread, which may write to its own.
template <class... Params>
void launch(const char* name, void (*kernel)(Params...), Extent blocks, Extent threads, size_t bytes,
            const void* stream, SameT<Params>... arguments) {
  static_assert((std::is_trivially_copyable_v<Params> && ...), "kernel parameters must be trivially copyable");
  static_assert(parameter_bytes<Params...>() <= kMostParameters, "kernel parameters take more than 32764 bytes");
  const auto call = [&] { kernel(arguments...); };
  const auto body = [](void* context) { (*static_cast<decltype(call)*>(context))(); };
  run_grid(name, blocks, threads, bytes, stream, body, const_cast<void*>(static_cast<const void*>(&call)));
}

}  // namespace cuda_on_cpu
