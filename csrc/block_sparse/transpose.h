// Transposition to pixel-major order for one instruction set: to[n, pixel, channel] = from[n, channel, pixel].
//
// from is [batch, channels, pixels] with strides batch_stride and channel_stride and contiguous pixels; to is
// contiguous [batch, pixels, channels]. An item is kTransposePixels pixels of one sample, all channels.
#pragma once

#include "block_sparse/panels.h"

namespace loco::block_sparse {

constexpr int64_t kTransposePixels = 64;  // pixels per item

inline int64_t transpose_items(const Transpose& call) { return call.batch * pieces(call.pixels, kTransposePixels); }

template <typename Square, typename Word>
void transpose_range(const Transpose& call, int64_t begin, int64_t end) {
  const int64_t parts = pieces(call.pixels, kTransposePixels);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t sample = item / parts, pixel = item % parts * kTransposePixels;
    const auto* from = static_cast<const Word*>(call.from) + sample * call.batch_stride + pixel;
    auto* to = static_cast<Word*>(call.to) + (sample * call.pixels + pixel) * call.channels;
    transpose<Square>(reinterpret_cast<const char*>(from), call.channel_stride * sizeof(Word), call.channels,
                      least(kTransposePixels, call.pixels - pixel), to, call.channels);
  }
}

}  // namespace loco::block_sparse
