// Sums over contiguous weights and the operations that shrink them, compiled for each instruction set.
// Sums are kept in interleaved lanes, which are added in a fixed order, so that the instruction set changes no bit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/capability.h"
#include "ring_prox/metric.h"

namespace loco::ring_prox {

constexpr int kLanes = 16;    // partial sums per sum
constexpr int kLaneSums = 5;  // sums computed in one pass, at most

// Contiguous weights and the ring of each: weight i belongs to ring_of_lane[i % period], or all weights belong to one
// ring.
struct Run {
  int64_t count;
  int ring;  // ring of all weights if the period is 0
  int64_t period;
  int rings;
  const int32_t* ring_of_lane = nullptr;       // [stride()], elements as wide as a float; -1 beyond the period
  const int64_t* ring_of_long_lane = nullptr;  // [stride()], as wide as a double
  double* lanes = nullptr;                     // [kLaneSums * stride()], scratch

  // The distance from one sum's lanes to those of the next.
  int64_t stride() const { return (period + kLanes - 1) / kLanes * kLanes; }
  bool uniform() const { return period == 0; }
};

// The loops over weights of type T. All sums are accumulated into the output, by ring. Unless `wide` is set, terms are
// computed in T, and four of them are summed in it: a vector holds twice as many floats, but these must neither vanish
// nor overflow. `out` may be x or u.
template <typename T>
struct RowKernels {
  // Add sum x^2 of each ring.
  void (*squares)(const T* x, const Run& run, bool wide, double* by_ring);
  // Add sum (d u)^2 of each ring, computed in float64.
  void (*weighted_squares)(const T* u, const T* d, const Run& run, double* by_ring);
  // Add the moments of each ring. c is [rings], or null for zeros. Powers from the first on are summed in the type of
  // their terms, unless `wide` is set.
  void (*moments)(const T* u, const T* d, const Run& run, bool wide, const double* c, Moments& moments);
  // Return the sums of math.h's Above for min(|u|, cap) over the weights where that exceeds level. d may be null: all
  // ones.
  Above (*above)(const T* u, const T* d, int64_t count, double cap, double level);
  // Return the largest level, at least -1, to which some weight, alone, would have to be clipped to lose t.
  double (*least_level)(const T* u, const T* d, int64_t count, double cap, double t);
  // Return max |x|, NaN if any element is NaN.
  double (*largest)(const T* x, int64_t count);
  // Write out = x * factor.
  void (*multiply)(const T* x, int64_t count, T factor, T* out);
  // Write out = x * factor of its ring.
  void (*multiply_rings)(const T* x, const Run& run, const double* by_ring, T* out);
  // Write out = u d / (d + c): u where c is 0, and 0 where c is infinite.
  void (*damp)(const T* u, const T* d, const Run& run, const double* c, T* out);
  // Write out = u with its magnitude clipped at cap.
  void (*clip)(const T* u, int64_t count, T cap, T* out);
};

LOCO_TABLES(avx512, RowKernels, rows)

}  // namespace loco::ring_prox
