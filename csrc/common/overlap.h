// Finds memory that would be written while something else of the same call uses it.
#pragma once

#include <cstdint>
#include <vector>

namespace loco {

// One tensor's memory. Sizes and strides (in elements) stay owned by the caller.
struct Region {
  const char* data;
  int64_t ndim;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t element_size;
  bool written;
  // Filled by measure():
  int64_t bytes = 0;   // from the first to one past the last byte
  bool dense = false;  // every byte of that range is used, once
};

// Sets bytes and dense; returns false if two elements of the region share memory.
bool measure(Region& region);

struct Conflict {
  int64_t first = -1, second = -1;  // indices into regions; -1: none
};

// The first two regions that share memory, at least one of them written. All must have been measured.
Conflict find_conflict(const std::vector<Region>& regions);

}  // namespace loco
