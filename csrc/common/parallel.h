// Lets code without torch run on torch's threads.
#pragma once

#include <cstdint>

namespace loco {

// Runs body(begin, end, context) over pieces of [begin, end), in parallel if the range is longer than grain.
using ParallelFor = void (*)(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*),
                             void* context);

constexpr int64_t kLeastMacs = 1 << 18;  // MACs of a thread; waking one does not pay below that

// Returns the grain for items of equal work, given that of all of them, in MACs.
inline int64_t grain_of(int64_t work, int64_t items) { return items > 0 ? 1 + kLeastMacs / (1 + work / items) : 1; }

// Calls body(begin, end) over pieces of [0, count). body is any callable object.
template <typename Body>
void run_parallel(ParallelFor parallel_for, int64_t count, int64_t grain, const Body& body) {
  const auto call = [](int64_t begin, int64_t end, void* context) { (*static_cast<const Body*>(context))(begin, end); };
  parallel_for(0, count, grain, call, const_cast<Body*>(&body));
}

}  // namespace loco
