// Sums over contiguous weights and their shrinkage, vectorised for each x86-64 level. Sums have interleaved parts,
// added up in an order of their own, so that the level changes no bit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ring_prox/math.h"

namespace loco::ring_prox {

constexpr int kLanes = 16;    // partial sums that go on side by side
constexpr int kLaneSums = 5;  // as many as are summed at a time

// Contiguous weights and the ring of each: of weight i it is ring_of_lane[i % period], or the same for all.
struct Run {
  int64_t count;
  int ring;  // of all, if the period is 0
  int64_t period;
  int rings;
  const int32_t* ring_of_lane;       // [period], as wide as floats
  const int64_t* ring_of_long_lane;  // [stride()], and as doubles; none beyond the period
  double* lanes;                     // [kLaneSums * stride()], for use meanwhile

  // From one sum's lanes to the next one's.
  int64_t stride() const { return (period + kLanes - 1) / kLanes * kLanes; }
  bool uniform() const { return period == 0; }
};

// Sums over each ring, with x = u d / (d + c): power[k][r] = sum x^2 / (d + c)^k.
struct Moments {
  static constexpr int kPowers = 4;
  double power[kPowers][kMaxRings];

  void clear(int rings) {
    for (auto& sums : power) std::fill(sums, sums + rings, 0.0);
  }
};

// All sums are added to what is there, by ring. Unless they are wide, terms are in the type of the weights, and four of
// them are summed in it: a vector holds twice as many floats, but they must neither vanish nor overflow.

// sum x^2
void squares(const float* x, const Run& run, bool wide, double* by_ring);
void squares(const double* x, const Run& run, bool wide, double* by_ring);
// sum (d u)^2, in float64
void weighed_squares(const float* u, const float* d, const Run& run, double* by_ring);
void weighed_squares(const double* u, const double* d, const Run& run, double* by_ring);
// c: by ring, null: zeros. Powers from the first on are summed in the type of their terms, unless they are wide.
void moments(const float* u, const float* d, const Run& run, bool wide, const double* c, Moments& moments);
void moments(const double* u, const double* d, const Run& run, bool wide, const double* c, Moments& moments);
// Of min(|u|, cap) where that exceeds level; d may be null: ones.
Above above(const float* u, const float* d, int64_t count, double cap, double level);
Above above(const double* u, const double* d, int64_t count, double cap, double level);
// The largest level, at least -1, to which a single weight would have to be clipped to lose t.
double least_level(const float* u, const float* d, int64_t count, double cap, double t);
double least_level(const double* u, const double* d, int64_t count, double cap, double t);
// max |x|; NaN if any is
double largest(const float* x, int64_t count);
double largest(const double* x, int64_t count);
// out = x * factor. Here and below out may be x or u.
void multiply(const float* x, int64_t count, float factor, float* out);
void multiply(const double* x, int64_t count, double factor, double* out);
// The same with a factor for each ring
void multiply(const float* x, const Run& run, const double* by_ring, float* out);
void multiply(const double* x, const Run& run, const double* by_ring, double* out);
// out = u d / (d + c), u where c is 0, 0 where it is infinite
void damp(const float* u, const float* d, const Run& run, const double* c, float* out);
void damp(const double* u, const double* d, const Run& run, const double* c, double* out);
// out = u, its size at most cap
void clip(const float* u, int64_t count, float cap, float* out);
void clip(const double* u, int64_t count, double cap, double* out);

}  // namespace loco::ring_prox
