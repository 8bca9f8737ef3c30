// Sums over a few rings that are kept in registers while weights are streamed, sixteen at a time.
#pragma once

#include <cstdint>
#include <cstring>

#include "ring_prox/lanes.h"

namespace loco::ring_prox {
LOCO_KERNELS_BEGIN

// `count` sums for each ring, the first of which is kept in float64 and all others in float32.
template <int rings, int count>
class RingSums {
 public:
  // Add sixteen weights. terms[s] is what each adds to sum s, and ring_of_lane is the ring of each; it is not read if
  // there is only one ring.
  LOCO_HD void add(const float (&terms)[count][kLanes], const int32_t* ring_of_lane) {
    Ints ring{};
    if (rings > 1) std::memcpy(&ring, ring_of_lane, sizeof ring);
#pragma GCC unroll 4
    for (int s = 0; s < count; ++s) {
      Floats all;
      std::memcpy(&all, terms[s], sizeof all);
#pragma GCC unroll 4
      for (int r = 0; r < rings; ++r) {
        Floats& sum = s == 0 ? short_[r] : rough_[s > 0 ? s - 1 : 0][r];
        if (rings == 1) {
          sum += all;
        } else {
          sum = ring == r ? sum + all : sum;
        }
      }
    }
  }

  // Flush the short float32 sums to float64. It must be called after at most kShortSum additions.
  LOCO_HD void settle() {
#pragma GCC unroll 4
    for (int r = 0; r < rings; ++r) {
      EightFloats low, high;
      std::memcpy(&low, &short_[r], sizeof low);
      std::memcpy(&high, reinterpret_cast<const char*>(&short_[r]) + sizeof low, sizeof high);
      exact_[0][r] += __builtin_convertvector(low, Doubles);
      exact_[1][r] += __builtin_convertvector(high, Doubles);
      short_[r] = Floats{};
    }
  }

  // Add the sums of ring r to sums[s][first + r].
  LOCO_HD void add_to(double* const (&sums)[count], int first) const {
#pragma GCC unroll 4
    for (int r = 0; r < rings; ++r) {
      double lanes[kLanes];
      std::memcpy(lanes, &exact_[0][r], sizeof(Doubles));
      std::memcpy(lanes + kLanes / 2, &exact_[1][r], sizeof(Doubles));
      sums[0][first + r] += total(lanes);
#pragma GCC unroll 4
      for (int s = 1; s < count; ++s) {
        for (int l = 0; l < kLanes; ++l) lanes[l] = static_cast<double>(rough_[s - 1][r][l]);
        sums[s][first + r] += total(lanes);
      }
    }
  }

 private:
  typedef float Floats __attribute__((vector_size(64)));
  typedef int32_t Ints __attribute__((vector_size(64)));
  typedef float EightFloats __attribute__((vector_size(32)));
  typedef double Doubles __attribute__((vector_size(64)));

  Floats short_[rings]{}, rough_[count > 1 ? count - 1 : 1][rings]{};
  Doubles exact_[2][rings]{};
};

LOCO_KERNELS_END
}  // namespace loco::ring_prox
