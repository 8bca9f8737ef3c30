// Dispatch of the mixed convolution on the CPU. The formula is in convolve.cpp, and the shapes and strides of all
// pointers are in cpu.h.
//
// A call's items are bands of rows of the result, of which each thread takes a contiguous range. A band is computed by
// one thread, so the number of threads changes no bit.
#include "mixed_conv/cpu.h"

#include <memory>

namespace loco::mixed_conv {

void convolve_cpu(const Convolution& call) {
  const auto& kernel = convolutions().of[static_cast<int>(call.dtype)];
  int64_t work = 0;
  for (const Part* part = call.parts; part < call.parts + call.count; ++part)
    work += part->filters * part->height * part->width;
  work *= call.from.channels * call.to.batch * call.to.height * call.to.width;
  const int64_t items = kernel.items(call);
  run_parallel(call.parallel_for, items, grain_of(work, items),
               [&](int64_t begin, int64_t end) { kernel.range(call, begin, end); });
}

void* scratch(int64_t bytes) {
  constexpr uintptr_t kCacheLine = 64;
  struct Buffer {
    std::unique_ptr<char[]> data;
    int64_t bytes = 0;
  };
  thread_local Buffer kept;
  if (kept.bytes < bytes) {
    kept.bytes = 0;
    kept.data.reset(new char[bytes + kCacheLine]);
    kept.bytes = bytes;
  }
  char* data = kept.data.get();
  return data + (kCacheLine - reinterpret_cast<uintptr_t>(data) % kCacheLine) % kCacheLine;
}

}  // namespace loco::mixed_conv
