// Dispatch of the block-sparse operators on the CPU.
//
//   product         to[n, r] = bias[r] + sum over entries j of row r of from[n, source[j]] block(j)
//   value_gradient  values[j] = sum over n of from[n, source[j]]^T to[n, row of j]
//   transpose         to[n, pixel, channel] = from[n, channel, pixel]
//
// Shapes and strides of all pointers are given in cpu.h.
//
// A call goes to the kernels of the best instruction set that has them for the dtype and block size. Its work is a list
// of items (panels of rows and batch, entries, or tiles of pixels), of which each thread takes a contiguous range.
// Items are never split, so the number of threads changes no bit.
#include "block_sparse/cpu.h"

#include <atomic>
#include <cstring>

#include "block_sparse/level.h"

namespace loco::block_sparse {
namespace {

constexpr int64_t kLeastShare = 1 << 18;  // MACs; waking a thread does not pay below that

#ifdef LOCO_X86_LEVELS
const Level* const kLevels[] = {&kLevelV4Bf16, &kLevelV4, &kLevelV3, &kLevelPortable};
#else
const Level* const kLevels[] = {&kLevelPortable};
#endif

// The levels that this machine supports, best first, and their names.
struct Found {
  const Level* levels[5] = {};
  const char* names[5] = {};

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

// Return the kernels of the first level, from the chosen one on, that has its own for the dtype and block size.
const Kernels& kernels_for(DType dtype, int64_t depth, int64_t width) {
  const auto kernels = depth == 1 && width == 1 ? &Level::depthwise : &Level::kernels;
  const int type = static_cast<int>(dtype);
  int at = first_level;
  while (!(found().levels[at]->*kernels)[type].product) ++at;
  return (found().levels[at]->*kernels)[type];
}

int64_t grain(int64_t work, int64_t items) { return items > 0 ? 1 + kLeastShare / (1 + work / items) : 1; }

}  // namespace

void product_cpu(const Product& call) {
  const Kernels& kernels = kernels_for(call.dtype, call.depth, call.width);
  const int64_t items = kernels.product_items(call);
  const int64_t work = call.first[call.rows] * call.groups * call.depth * call.width * call.batch;
  run_parallel(call.parallel_for, items, grain(work, items),
               [&](int64_t begin, int64_t end) { kernels.product(call, begin, end); });
}

void value_gradient_cpu(const ValueGradient& call) {
  const int64_t items = call.first[call.rows], block = call.groups * call.depth * call.width;
  if (items == 0) return;
  if (call.batch == 0) {
    std::memset(call.values, 0, items * block * element_size(call.dtype));
    return;
  }
  const Kernels& kernels = kernels_for(call.dtype, call.depth, call.width);
  run_parallel(call.parallel_for, items, grain(items * block * call.batch, items),
               [&](int64_t begin, int64_t end) { kernels.value_gradient(call, begin, end); });
}

void transpose_cpu(const Transpose& call) {
  const int type = static_cast<int>(call.dtype);
  int at = first_level;
  while (!found().levels[at]->transpose[type]) ++at;
  const auto transpose = found().levels[at]->transpose[type];
  run_parallel(call.parallel_for, transpose_items(call), 1 + kLeastShare / (kTransposePixels * (1 + call.channels)),
               [&](int64_t begin, int64_t end) { transpose(call, begin, end); });
}

const char* const* levels() { return found().names; }

bool use_level(const char* name) {
  for (int at = 0; found().names[at]; ++at) {
    if (std::strcmp(found().names[at], name) == 0) return first_level = at, true;
  }
  return false;
}

}  // namespace loco::block_sparse
