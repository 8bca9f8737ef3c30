// Launching a kernel: limits, the order of blocks and threads, shared memory.
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
#include "intrinsics.h"

// As in common/launch.h.
#define LOCO_LAUNCH(kernel, blocks, threads, ...) LOCO_LAUNCH_SHARED(kernel, blocks, threads, 0, __VA_ARGS__)
#define LOCO_LAUNCH_SHARED(kernel, blocks, threads, bytes, ...) \
  ::cuda_on_cpu::launch(#kernel, kernel, blocks, threads, bytes, __VA_ARGS__)
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
struct SharedMemory {
  unsigned char* begin = nullptr;
  size_t size = 0;

  void poison() const {
    if (size > 0) std::memset(begin, 0xff, size);
  }

  // At least what the last block has written to. Long stretches are mostly untouched.
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
inline SharedMemory shared_memory() { return {}; }
#else
inline thread_local unsigned char shared_marker = 0;

inline SharedMemory shared_memory() {
  SharedMemory found;
  const auto look = [](dl_phdr_info* info, size_t, void* result) {
    auto* memory = static_cast<unsigned char*>(info->dlpi_tls_data);
    for (int i = 0; memory != nullptr && i < info->dlpi_phnum; ++i) {
      const size_t size = info->dlpi_phdr[i].p_memsz;
      if (info->dlpi_phdr[i].p_type != PT_TLS || &shared_marker < memory || &shared_marker >= memory + size) continue;
      *static_cast<SharedMemory*>(result) = {memory, size};
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

// Dynamic shared memory of the running grid, beside its __shared__ variables.
inline unsigned char* requested_memory = nullptr;

inline void run_block(const char* kernel, uint64_t index, Block::Body body, void* context, const SharedMemory& shared,
                      const SharedMemory& requested) {
  const uint64_t x = gridDim.x, y = gridDim.y;
  blockIdx = {static_cast<unsigned>(index % x), static_cast<unsigned>(index / x % y),
              static_cast<unsigned>(index / x / y)};
  shared.poison();
  requested.poison();
  block().run(kernel, static_cast<int>(blockDim.x * blockDim.y * blockDim.z), body, context, order());
  const int64_t used = shared.used() + static_cast<int64_t>(requested.size);
  if (used > kMostShared) fail("%s: more than %ld bytes of shared memory", kernel, kMostShared);
}

inline void run_grid(const char* kernel, const Extent& blocks, const Extent& threads, size_t bytes, Block::Body body,
                     void* context) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  if (!blocks.within(INT32_MAX, 65535, 65535) || !threads.within(1024, 1024, 64) || threads.count() > 1024) {
    std::fprintf(stderr, "cuda_on_cpu: %s: launch of %u x %u x %u blocks of %u x %u x %u threads is refused\n", kernel,
                 blocks.size.x, blocks.size.y, blocks.size.z, threads.size.x, threads.size.y, threads.size.z);
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  ++launches;
  gridDim = blocks.size;
  blockDim = threads.size;
  const SharedMemory shared = shared_memory();
  const std::unique_ptr<unsigned char[]> memory(new unsigned char[bytes]);  // a sanitizer sees what lies beside it
  const SharedMemory requested{memory.get(), bytes};
  requested_memory = memory.get();
  const uint64_t count = blocks.count();
  std::vector<uint64_t> shuffled(order().kind == Order::shuffled ? count : 0);
  std::iota(shuffled.begin(), shuffled.end(), uint64_t{0});
  for (uint64_t i = shuffled.size(); i > 1; --i) std::swap(shuffled[i - 1], shuffled[order().random() % i]);
  const char* const last = std::getenv("CUDA_ON_CPU_LAST_BLOCKS");
  const uint64_t first = last != nullptr ? count - std::min(count, uint64_t{std::strtoull(last, nullptr, 10)}) : 0;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t index = !shuffled.empty() ? shuffled[i] : order().kind == Order::reverse ? count - 1 - i : i;
    if (index >= first) run_block(kernel, index, body, context, shared, requested);
  }
}

// Arguments are converted and copied at the launch, and once more for each thread, which may write to its own.
template <class... Params>
void launch(const char* name, void (*kernel)(Params...), Extent blocks, Extent threads, size_t bytes,
            const void* /*stream*/, SameT<Params>... arguments) {
  static_assert((std::is_trivially_copyable_v<Params> && ...), "kernel parameters must be trivially copyable");
  static_assert(parameter_bytes<Params...>() <= kMostParameters, "kernel parameters take more than 32764 bytes");
  const auto call = [&] { kernel(arguments...); };
  const auto body = [](void* context) { (*static_cast<decltype(call)*>(context))(); };
  run_grid(name, blocks, threads, bytes, body, const_cast<void*>(static_cast<const void*>(&call)));
}

}  // namespace cuda_on_cpu
