// Transpose to pixel-major order: to[n, pixel, channel] = from[n, channel, pixel].
//
// from is [batch, channels, pixels] with strides batch_stride and channel_stride and contiguous pixels; to is
// contiguous [batch, pixels, channels]. An item is kTransposePixels pixels of one sample, all channels.
#include "block_sparse/panels.h"

namespace loco::block_sparse {
LOCO_KERNELS_BEGIN

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

const TransposeKernels transposes{{transpose_range<PlainSquare, double>, transpose_range<WordSquare, float>,
                                   transpose_range<PlainSquare, uint16_t>, transpose_range<PlainSquare, uint16_t>}};

LOCO_KERNELS_END
}  // namespace loco::block_sparse
