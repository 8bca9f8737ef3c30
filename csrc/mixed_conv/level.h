// The table of kernels of one instruction set.
#pragma once

#include "mixed_conv/convolve.h"

namespace loco::mixed_conv {

struct Kernels {
  int64_t (*items)(const Convolution&);
  void (*range)(const Convolution&, int64_t begin, int64_t end);
};

struct Level {
  const char* name;
  bool (*runs_here)();
  Kernels kernels[2];  // indexed by DType: float64, float32
};

// An arithmetic with the size of its tiles: the most filters and vectors of pixels whose sums fit into registers.
template <typename A, int Kernels, int Pixels>
struct Tiled : A {
  static constexpr int kKernels = Kernels, kPixels = Pixels;
};

template <typename Double, typename Float>
constexpr Level level_of(const char* name, bool (*runs_here)()) {
  return {name,
          runs_here,
          {{convolve_items<Double>, convolve_range<Double>}, {convolve_items<Float>, convolve_range<Float>}}};
}

extern const Level kLevelV4, kLevelV3, kLevelPortable;

}  // namespace loco::mixed_conv
