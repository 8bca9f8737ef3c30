// The scratch memory of a thread, and writing the results of a band: to[n, o, y, x] = result[n, o, y, x].
//
// Results are vectors of interleaved images and columns (band.h). to is [batch, channels, height, width] with the
// strides of Images (cpu.h). The thread that computes a band writes it: by vectors if columns are contiguous and no
// images are interleaved, otherwise lane by lane.
#pragma once

#include <cstring>

#include "mixed_conv/copy.h"

namespace loco::mixed_conv {
LOCO_KERNELS_BEGIN

// The place of a vector of pixels: where it is read, and where the results for its columns of the first image are
// written.
template <typename L>
struct PixelPlace {
  const typename L::Word* from;
  typename L::Word* pixel;
  int64_t columns;
};

// Write the offsets of the taps of all parts, one part after the other.
inline void fill_offsets(const Convolution& call, const BandLayout& layout, int64_t* offsets) {
  for (const Part* part = call.parts; part < call.parts + call.count; ++part) {
    for (int64_t y = 0; y < part->height; ++y) {
      const int64_t row = layout.top - part->top + y * call.dilation[0];
      for (int64_t x = 0; x < part->width; ++x) {
        const int64_t column = layout.left - part->left + x * call.dilation[1];
        *offsets++ =
            row * layout.row + column % call.stride[1] * layout.residue + column / call.stride[1] * layout.images;
      }
    }
  }
}

// The arrays, which are consecutive in the thread's scratch memory.
template <typename L>
struct Workspace {
  using Word = typename L::Word;

  Word* copy;             // copy of a band, see BandLayout
  PixelPlace<L>* places;  // one for each vector of a band
  int64_t* offsets;       // offsets of taps

  Workspace(const Convolution& call, const BandLayout& layout) {
    const int64_t words = layout.elements(call), vectors = layout.rows * layout.vectors;
    int64_t taps = 0;
    for (const Part* part = call.parts; part < call.parts + call.count; ++part) taps += part->height * part->width;
    copy = static_cast<Word*>(scratch(words * sizeof(Word) + vectors * sizeof(PixelPlace<L>) + taps * sizeof(int64_t)));
    std::memset(copy, 0, words * sizeof(Word));  // columns outside the images stay zero
    places = reinterpret_cast<PixelPlace<L>*>(copy + words);
    offsets = reinterpret_cast<int64_t*>(places + vectors);
    fill_offsets(call, layout, offsets);
  }
};

template <typename L>
struct Band {
  using Word = typename L::Word;
  const Convolution& call;
  const BandLayout& layout;
  const Workspace<L>& work;
  int64_t first_image, vectors;

  template <int K, int V>
  LOCO_HD void store(const PixelPlace<L>& place, const int64_t* channels, const typename L::Vec (&sums)[K][V],
                     int v) const {
    const Images& to = call.to;
    if (place.columns == L::kWidth && !to.by_pixel()) {
      LOCO_UNROLL for (int k = 0; k < K; ++k) L::store(place.pixel + channels[k] * to.channel_stride, sums[k][v]);
      return;
    }
    Word lanes[K][L::kWidth];
    LOCO_UNROLL for (int k = 0; k < K; ++k) L::store(lanes[k], sums[k][v]);
    for (int64_t n = 0; n < std::min(layout.images, to.batch - first_image); ++n) {
      Word* pixel = place.pixel + n * to.batch_stride;
      for (int64_t column = 0; column < place.columns; ++column, pixel += to.column_stride) {
        const int64_t lane = column * layout.images + n;
        LOCO_UNROLL for (int k = 0; k < K; ++k) pixel[channels[k] * to.channel_stride] = lanes[k][lane];
      }
    }
  }
};

LOCO_KERNELS_END
}  // namespace loco::mixed_conv
