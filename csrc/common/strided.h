// Walks tensors of any strides in one common order.
//
// Elements are numbered along the dimensions, ordered from the fastest to the slowest in the memory of a leading tensor
// (the parameter). Each operand has its own Nest, which gives the offsets of the same sequence of elements, with
// dimensions merged where the operand steps through them evenly. A Nest of one axis with stride 1 is "flat": element i
// is at data + i.
#pragma once

#include <algorithm>
#include <cstdint>

namespace loco {

constexpr int kMaxDims = 64;  // most dimensions of a tensor, as in torch
constexpr int kMaxAxes = 12;  // most axes of a nest

struct Axis {
  int64_t size;
  int64_t stride;  // in elements
};

struct Nest {
  int count;
  Axis axes[kMaxAxes];  // fastest first

  bool flat() const { return count == 0 || (count == 1 && axes[0].stride == 1); }

  int64_t length() const {
    int64_t product = 1;
    for (int a = 0; a < count; ++a) product *= axes[a].size;
    return product;
  }

  bool operator==(const Nest& other) const {
    return count == other.count && std::equal(axes, axes + count, other.axes, [](const Axis& x, const Axis& y) {
             return x.size == y.size && x.stride == y.stride;
           });
  }
};

// Writes the dimensions with more than one element to `order`, fastest in memory first, and returns their number.
inline int memory_order(int64_t ndim, const int64_t* sizes, const int64_t* strides, int8_t* order) {
  int count = 0;
  for (int64_t d = ndim - 1; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    int at = count++;
    for (; at > 0 && strides[order[at - 1]] > strides[d]; --at) order[at] = order[at - 1];
    order[at] = static_cast<int8_t>(d);
  }
  return count;
}

// Merges the dimensions order[0 .. count - 1] into `nest`. Returns false if more than kMaxAxes axes remain.
inline bool make_nest(const int8_t* order, int count, const int64_t* sizes, const int64_t* strides, Nest& nest) {
  nest.count = 0;
  for (int k = 0; k < count; ++k) {
    const int64_t size = sizes[order[k]], stride = strides[order[k]];
    if (nest.count > 0) {
      Axis& last = nest.axes[nest.count - 1];
      if (stride == last.stride * last.size) {
        last.size *= size;
        continue;
      }
    }
    if (nest.count == kMaxAxes) return false;
    nest.axes[nest.count++] = {size, stride};
  }
  return true;
}

// Calls visit(position, offset, stride, count) for each evenly spaced run among the `count` elements from `begin` on.
// The run has its own `count` elements, the first of which is element begin + position and is at `offset`.
template <typename Visit>
inline void for_runs(const Nest& nest, int64_t begin, int64_t count, const Visit& visit) {
  int64_t index[kMaxAxes] = {};
  int64_t offset = 0, rest = begin;
  for (int a = 0; a < nest.count; ++a) {
    index[a] = a + 1 < nest.count ? rest % nest.axes[a].size : rest;
    rest /= nest.axes[a].size;
    offset += index[a] * nest.axes[a].stride;
  }
  if (nest.count == 0) {
    visit(int64_t{0}, int64_t{0}, int64_t{0}, count);
    return;
  }
  const Axis& inner = nest.axes[0];
  for (int64_t position = 0; position < count;) {
    const int64_t run = std::min(count - position, inner.size - index[0]);
    visit(position, offset, inner.stride, run);
    position += run;
    index[0] += run;
    offset += run * inner.stride;
    for (int a = 0; a + 1 < nest.count && index[a] == nest.axes[a].size; ++a) {
      offset += nest.axes[a + 1].stride - index[a] * nest.axes[a].stride;
      index[a] = 0;
      ++index[a + 1];
    }
  }
}

}  // namespace loco
