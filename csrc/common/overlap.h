// Finds memory that a call would write while another of its tensors uses it.
#pragma once

#include <cstdint>
#include <vector>

namespace loco {

// One tensor's memory. Sizes and strides (in elements, [ndim]) stay owned by the caller.
struct Region {
  const char* data;
  int64_t ndim;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t element_size;
  bool written;
  // measure() fills these:
  int64_t bytes = 0;   // from the first byte to one past the last
  bool dense = false;  // every byte of that range is used exactly once
};

// Sets bytes and dense; returns false if two elements of the region share memory.
bool measure(Region& region);

struct Conflict {
  int64_t first = -1, second = -1;  // indices into regions; -1: none
};

// Returns the first two regions that share memory and of which at least one is written. All regions must have been
// measured.
Conflict find_conflict(const std::vector<Region>& regions);

}  // namespace loco
