// The regions' memory intervals are sorted and swept. Elements are compared one by one only for tensors with gaps
// (views such as x[:, ::2]) whose intervals intersect. Parameters are nearly always dense, so the sweep alone decides.
#include "common/overlap.h"

#include <algorithm>
#include <numeric>

#include "common/strided.h"

namespace loco {
namespace {

// Marks the region's bytes in `cells`, which has one cell per byte from `base` on. Returns false if a cell was marked
// already.
bool mark(const Region& region, const char* base, std::vector<bool>& cells) {
  int64_t count = 1;
  int8_t order[kMaxDims];
  const int axes = memory_order(region.ndim, region.sizes, region.strides, order);
  for (int k = 0; k < axes; ++k) count *= region.sizes[order[k]];
  int64_t index[kMaxDims] = {};
  int64_t offset = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = region.data + offset * region.element_size - base;
    for (int64_t byte = at; byte < at + region.element_size; ++byte) {
      if (cells[byte]) return false;
      cells[byte] = true;
    }
    for (int k = 0; k < axes; ++k) {
      const int d = order[k];
      offset += region.strides[d];
      if (++index[d] < region.sizes[d]) break;
      offset -= region.sizes[d] * region.strides[d];
      index[d] = 0;
    }
  }
  return true;
}

// Returns whether two measured regions whose intervals intersect share memory.
bool touch(const Region& a, const Region& b) {
  if (a.dense && b.dense) return true;
  const char* base = std::min(a.data, b.data);
  const char* end = std::max(a.data + a.bytes, b.data + b.bytes);
  std::vector<bool> cells(end - base);
  return !(mark(a, base, cells) && mark(b, base, cells));
}

}  // namespace

bool measure(Region& region) {
  int8_t order[kMaxDims];
  const int axes = memory_order(region.ndim, region.sizes, region.strides, order);
  int64_t span = 1, count = 1;
  bool nested = true;
  for (int64_t d = 0; d < region.ndim; ++d) count *= region.sizes[d];
  if (count == 0) {
    region.bytes = 0;
    region.dense = true;
    return true;
  }
  for (int k = 0; k < axes; ++k) {
    const int64_t stride = region.strides[order[k]];
    nested = nested && stride >= span;
    span += (region.sizes[order[k]] - 1) * stride;
  }
  region.bytes = span * region.element_size;
  region.dense = span == count && nested;
  if (nested) return true;
  if (span < count) return false;
  std::vector<bool> cells(region.bytes);
  return mark(region, region.data, cells);
}

Conflict find_conflict(const std::vector<Region>& regions) {
  std::vector<int64_t> sorted(regions.size());
  std::iota(sorted.begin(), sorted.end(), 0);
  std::sort(sorted.begin(), sorted.end(), [&](int64_t a, int64_t b) { return regions[a].data < regions[b].data; });
  std::vector<int64_t> open;
  for (const int64_t i : sorted) {
    const Region& region = regions[i];
    if (region.bytes == 0) continue;
    open.erase(std::remove_if(open.begin(), open.end(),
                              [&](int64_t j) { return regions[j].data + regions[j].bytes <= region.data; }),
               open.end());
    for (const int64_t j : open) {
      if ((region.written || regions[j].written) && touch(regions[j], region)) return {std::min(i, j), std::max(i, j)};
    }
    open.push_back(i);
  }
  return {};
}

}  // namespace loco
