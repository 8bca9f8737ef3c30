// Dispatch of the mixed convolution on the CPU. The formula is in convolve.h, and the shapes and strides of all
// pointers are in cpu.h.
//
// A call goes to the kernels of the chosen instruction set. Its items are bands of rows of the result, of which each
// thread takes a contiguous range. A band is computed by one thread, so the number of threads changes no bit.
#include "mixed_conv/cpu.h"

#include <atomic>
#include <cstring>
#include <memory>

#include "common/platform.h"
#include "mixed_conv/level.h"

namespace loco::mixed_conv {
namespace {

constexpr int64_t kLeastShare = 1 << 18;  // MACs; waking a thread does not pay below that

#ifdef LOCO_X86_LEVELS
const Level* const kLevels[] = {&kLevelV4, &kLevelV3, &kLevelPortable};
#else
const Level* const kLevels[] = {&kLevelPortable};
#endif

// The levels that this machine supports, best first, and their names.
struct Found {
  const Level* levels[4] = {};
  const char* names[4] = {};

  Found() {
    int count = 0;
    for (const Level* level : kLevels) {
      if (level->runs_here()) levels[count] = level, names[count++] = level->name;
    }
  }
};

const Found& found() {
  static const Found all;
  return all;
}

std::atomic<int> first_level{0};

}  // namespace

void convolve_cpu(const Convolution& call) {
  const Kernels& kernels = found().levels[first_level]->kernels[static_cast<int>(call.dtype)];
  int64_t work = 0;
  for (const Part* part = call.parts; part < call.parts + call.count; ++part)
    work += part->kernels * part->height * part->width;
  work *= call.from.channels * call.to.batch * call.to.height * call.to.width;
  const int64_t items = kernels.items(call);
  run_parallel(call.parallel_for, items, 1 + kLeastShare / (1 + work / items),
               [&](int64_t begin, int64_t end) { kernels.range(call, begin, end); });
}

void* scratch(int64_t bytes) {
  constexpr uintptr_t kCacheLine = 64;
  struct Registered {
    std::unique_ptr<char[]> data;
    int64_t bytes = 0;
  };
  thread_local Registered kept;
  if (kept.bytes < bytes) {
    kept.bytes = 0;
    kept.data.reset(new char[bytes + kCacheLine]);
    kept.bytes = bytes;
  }
  char* data = kept.data.get();
  return data + (kCacheLine - reinterpret_cast<uintptr_t>(data) % kCacheLine) % kCacheLine;
}

const char* const* levels() { return found().names; }

bool use_level(const char* name) {
  for (int at = 0; found().names[at]; ++at) {
    if (std::strcmp(found().names[at], name) == 0) return first_level = at, true;
  }
  return false;
}

}  // namespace loco::mixed_conv
