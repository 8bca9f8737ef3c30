// A tile: the results of K filters at V vectors of pixels, summed in registers.
//
//   sums[k, v] += sum over channels c and taps t of weight[k, c, t] * at[v][c * plane + offsets[t]]
//
// weight is contiguous [filters, channels, taps]; at[v] points to vector v in the copy of the band, whose channels are
// `plane` elements apart; offsets is [taps]. One thread computes a tile. A weight is read once for all vectors, and no
// MACs are spent on taps that a smaller filter does not have.
#pragma once

#include "common/vec.h"
#include "mixed_conv/copy.h"

namespace loco::mixed_conv {
LOCO_KERNELS_BEGIN

// Offsets of a part's taps, relative to a vector's place in the band.
struct Taps {
  const int64_t* offsets;
  int64_t count, channels, plane;
};

// Add the products of one tap of one channel.
template <typename L, int K, int V>
LOCO_HD void multiply_tap(const typename L::Word* weight, int64_t per_filter, const typename L::Word* const (&at)[V],
                          int64_t offset, typename L::Vec (&sums)[K][V]) {
  typename L::Vec pixels[V];
  LOCO_UNROLL for (int v = 0; v < V; ++v) pixels[v] = L::load(at[v] + offset);
  LOCO_UNROLL for (int k = 0; k < K; ++k) {
    const auto factor = L::broadcast(reinterpret_cast<const char*>(weight + k * per_filter));
    LOCO_UNROLL for (int v = 0; v < V; ++v) sums[k][v] = L::multiply_add(factor, pixels[v], sums[k][v]);
  }
}

// Add weight[k][channel][tap] times vector v there to sums[k][v], in the order of channels, then taps. Each channel's
// pixels are prefetched while those of the channel before are multiplied.
template <typename L, int K, int V>
LOCO_HD void multiply(const Taps& taps, const typename L::Word* weight, const typename L::Word* const (&at)[V],
                      typename L::Vec (&sums)[K][V]) {
  const int64_t per_filter = taps.channels * taps.count, first = taps.offsets[0];
  if (taps.count == 1) {
    const int64_t past = first + taps.channels * taps.plane;
    for (int64_t offset = first; offset < past; offset += taps.plane, ++weight)
      multiply_tap<L, K, V>(weight, per_filter, at, offset, sums);
    return;
  }
  const int64_t next_first = taps.plane + first, next_last = taps.plane + taps.offsets[taps.count - 1] + L::kWidth - 1;
  for (int64_t channel = 0; channel < taps.channels; ++channel) {
    const int64_t plane = channel * taps.plane;
    LOCO_UNROLL for (int v = 0; v < V; ++v) {
      __builtin_prefetch(at[v] + plane + next_first);
      __builtin_prefetch(at[v] + plane + next_last);
    }
    for (int64_t tap = 0; tap < taps.count; ++tap, ++weight)
      multiply_tap<L, K, V>(weight, per_filter, at, plane + taps.offsets[tap], sums);
  }
}

LOCO_KERNELS_END
}  // namespace loco::mixed_conv
