// Tables of decay coefficients, laid out for the inner loops.
//
// A decay map repeats along a parameter's memory: every 9 elements for a contiguous 3x3 kernel, every 9*C_in for a
// channels_last one. A table holds as many whole periods as fit into kTable elements, and a multiple of kVector periods
// if possible, so that a loop over vectors ends without a tail. Maps with a period above kTable get no table.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include "common/strided.h"
#include "optim_step/rules.h"

namespace loco::optim_step {

constexpr int64_t kTable = 2048;  // most elements of a table
constexpr int64_t kVector = 16;   // elements of the widest vector

// Returns the axes of a map's nest up to the last one along which the map changes.
inline Nest repeating_part(const Nest& nest) {
  Nest part = nest;
  while (part.count > 0 && part.axes[part.count - 1].stride == 0) --part.count;
  return part;
}

// Writes the decay coefficients of elements begin .. begin + count - 1 to `out`, [count].
template <typename T>
void fill_coefficients(const double* map, const Nest& nest, const Coefficients& c, int64_t begin, int64_t count,
                       T* out) {
  for_runs(nest, begin, count, [&](int64_t position, int64_t offset, int64_t stride, int64_t run) {
    if (stride == 0) {
      std::fill_n(out + position, run, static_cast<T>(c.at(map[offset])));
    } else {
      for (int64_t i = 0; i < run; ++i) out[position + i] = static_cast<T>(c.at(map[offset + i * stride]));
    }
  });
}

// Caches the tables of one call. Parameters that share map, group and memory layout share a table.
template <typename T>
class DecayTables {
 public:
  // Returns the table for `part`, the repeating_part of the map's nest; it must have at least one axis and at most
  // kTable elements. The reference stays valid as long as this object.
  const std::vector<T>& find_or_make(const double* map, const Nest& part, int64_t group, const Coefficients& c) {
    for (const Table& table : tables_) {
      if (table.map == map && table.group == group && table.part == part) return table.values;
    }
    const int64_t period = part.length();
    const int64_t unit = period * kVector <= kTable ? period * kVector : period;
    std::vector<T> values(kTable / unit * unit);
    fill_coefficients(map, part, c, 0, period, values.data());
    for (size_t i = period; i < values.size(); ++i) values[i] = values[i - period];
    tables_.push_back({map, group, part, std::move(values)});
    return tables_.back().values;
  }

 private:
  struct Table {
    const double* map;
    int64_t group;
    Nest part;
    std::vector<T> values;
  };

  std::deque<Table> tables_;
};

}  // namespace loco::optim_step
