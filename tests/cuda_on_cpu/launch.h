// Launching a kernel: limits, the stream, the order of blocks and threads. Grids and blocks have one dimension.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

template <class... Params>
constexpr size_t parameter_bytes() {
  size_t at = 0;
  ((at = (at + alignof(Params) - 1) / alignof(Params) * alignof(Params) + sizeof(Params)), ...);
  return at;
}

// Returns how many blocks run at the same time. They run one after the other where their __shared__ variables cannot be
// told from other variables.
inline int most_residents() { return order().kind == Order::shuffled && shared_variables().size > 0 ? 3 : 1; }

// Returns how many of these blocks run at the same time.
inline unsigned together(unsigned blocks) { return std::min(blocks, static_cast<unsigned>(most_residents())); }

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

inline void run_grid(const char* kernel, int64_t blocks, int64_t threads, size_t bytes, const void* stream,
                     Grid::Body body, void* context) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  check_stream(kernel, stream);
  if (blocks < 1 || blocks > INT32_MAX || threads < 1 || threads > 1024) {
    std::fprintf(stderr, "cuda_on_cpu: %s: launch of %ld blocks of %ld threads is refused\n", kernel, blocks, threads);
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  if (is_missing(kernel)) {
    last_error = cudaErrorNoKernelImageForDevice;
    return;
  }
  ++launches;
  gridDim = dim3(static_cast<unsigned>(blocks));
  blockDim = dim3(static_cast<unsigned>(threads));
  const int most = most_residents();
  SharedMemory shared(kernel, bytes, most);
  const OnDevice on_device;
  grid().run(kernel, blocks_in_order(blocks), most, static_cast<int>(threads), body, context, order(), shared);
}

// Arguments are converted and copied at the launch, and once more for each thread, which may write to its own.
template <class... Params>
void launch(const char* name, void (*kernel)(Params...), int64_t blocks, int64_t threads, size_t bytes,
            const void* stream, SameT<Params>... arguments) {
  static_assert((std::is_trivially_copyable_v<Params> && ...), "kernel parameters must be trivially copyable");
  static_assert(parameter_bytes<Params...>() <= kMostParameters, "kernel parameters take more than 32764 bytes");
  const auto call = [&] { kernel(arguments...); };
  const auto body = [](void* context) { (*static_cast<decltype(call)*>(context))(); };
  run_grid(name, blocks, threads, bytes, stream, body, const_cast<void*>(static_cast<const void*>(&call)));
}

}  // namespace cuda_on_cpu
