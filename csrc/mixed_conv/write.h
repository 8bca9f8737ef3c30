// The scratch memory of a thread, and writing the results of a band: to[n, o, y, x] = result[n, o, y, x].
//
// Results are vectors of interleaved images and columns (band.h). to is [batch, channels, height, width] with the
// strides of Images (cpu.h). The thread that computes a band writes it: by vectors if columns are contiguous and no
// images are interleaved, otherwise lane by lane, or, with Workspace::results, by transposing squares of lanes and
// channels.
#pragma once

#include <cstring>

#include "mixed_conv/copy.h"

namespace loco::mixed_conv {
LOCO_KERNELS_BEGIN

constexpr int64_t kWeightBytes = 512 << 10;  // weights that the L2 cache holds beside a band

// The place of a vector of pixels: where it is read, and where the results for its columns of the first image are
// written.
template <typename L>
struct PixelPlace {
  const typename L::Word* from;
  typename L::Word* pixel;
  int64_t columns;
};

// Return whether results are gathered and written by whole pixels. If channels are contiguous, filters write to the
// same cache lines, so this pays as long as all weights fit into the cache.
template <typename L>
bool writes_whole_pixels(const Convolution& call) {
  int64_t weights = 0;
  for (const Part* part = call.parts; part < call.parts + call.count; ++part)
    weights += part->filters * part->height * part->width * call.from.channels;
  return call.to.by_pixel() && weights * static_cast<int64_t>(sizeof(typename L::Word)) <= kWeightBytes;
}

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
  static constexpr int64_t kTileLanes = L::kPixels * L::kWidth, kSquare = L::Square::kSize;

  Word* copy;  // copy of a band, see BandLayout
  // Buffers for pixels that are written when all of their channels are done: results is [channels rounded up to
  // squares, lanes of a tile] and transposed [lanes of a vector, channels of a square]. Null if results are written
  // directly.
  Word *results = nullptr, *transposed = nullptr;
  PixelPlace<L>* places;                     // one for each vector of a band
  int64_t *lane_places, *transposed_places;  // [lanes], offsets of a vector's pixels in the result and in `transposed`
  int64_t* offsets;                          // offsets of taps

  Workspace(const Convolution& call, const BandLayout& layout) {
    const int64_t channels = writes_whole_pixels<L>(call) ? (call.to.channels + kSquare - 1) / kSquare * kSquare : 0;
    const int64_t copied = layout.elements(call), waiting = channels * kTileLanes;
    const int64_t words = copied + waiting + kSquare * L::kWidth, vectors = layout.rows * layout.vectors;
    int64_t taps = 0;
    for (const Part* part = call.parts; part < call.parts + call.count; ++part) taps += part->height * part->width;
    copy = static_cast<Word*>(
        scratch(words * sizeof(Word) + vectors * sizeof(PixelPlace<L>) + (2 * L::kWidth + taps) * sizeof(int64_t)));
    if (channels) results = copy + copied, transposed = results + waiting;
    std::memset(copy, 0, copied * sizeof(Word));  // columns outside the images stay zero
    places = reinterpret_cast<PixelPlace<L>*>(copy + words);
    lane_places = reinterpret_cast<int64_t*>(places + vectors);
    transposed_places = lane_places + L::kWidth;
    offsets = transposed_places + L::kWidth;
    for (int64_t lane = 0; lane < L::kWidth; ++lane) {
      lane_places[lane] = lane / layout.images * call.to.column_stride + lane % layout.images * call.to.batch_stride;
      transposed_places[lane] = lane * kSquare;
    }
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

  static constexpr int64_t kTileLanes = Workspace<L>::kTileLanes, kSquare = Workspace<L>::kSquare;

  template <int K, int V>
  LOCO_HD void store(const PixelPlace<L>& place, const int64_t* channels, const typename L::Vec (&sums)[K][V],
                     int v) const {
    const Images& to = call.to;
    if (work.results) {
      Word* lanes = work.results + v * L::kWidth;
      LOCO_UNROLL for (int k = 0; k < K; ++k) L::store(lanes + channels[k] * kTileLanes, sums[k][v]);
      return;
    }
    if (place.columns == L::kWidth && !to.by_pixel()) {
      LOCO_UNROLL for (int k = 0; k < K; ++k) L::store(place.pixel + channels[k] * to.channel_stride, sums[k][v]);
      return;
    }
    Word lanes[K][L::kWidth];
    LOCO_UNROLL for (int k = 0; k < K; ++k) L::store(lanes[k], sums[k][v]);
    for_pixels(place, [&](int64_t lane, Word* pixel) LOCO_INLINE {
      LOCO_UNROLL for (int k = 0; k < K; ++k) pixel[channels[k] * to.channel_stride] = lanes[k][lane];
    });
  }

  // Call body(lane, pixel) for the lanes of a vector that are pixels of the result.
  template <typename Body>
  LOCO_HD void for_pixels(const PixelPlace<L>& place, const Body& body) const {
    for (int64_t n = 0; n < images(); ++n) {
      Word* pixel = place.pixel + n * call.to.batch_stride;
      for (int64_t column = 0; column < place.columns; ++column, pixel += call.to.column_stride)
        body(column * layout.images + n, pixel);
    }
  }

  void write_pixels(int64_t index, int64_t count) const {
    for (int64_t v = 0; v < count; ++v) {
      const PixelPlace<L>& place = work.places[index + v];
      const bool whole = place.columns == layout.columns && images() == layout.images;
      for (int64_t channel = 0; channel < call.to.channels; channel += kSquare) {
        const int64_t some = std::min(kSquare, call.to.channels - channel);
        const Word* lanes = work.results + channel * kTileLanes + v * L::kWidth;
        if (whole) {
          transpose_lanes(lanes, some, place.pixel + channel, work.lane_places);
          continue;
        }
        transpose_lanes(lanes, kSquare, work.transposed, work.transposed_places);
        for_pixels(place, [&](int64_t lane, Word* pixel)
                              LOCO_INLINE { spread(work.transposed + lane * kSquare, 1, some, pixel + channel, 1); });
      }
    }
  }

  // Write to[places[lane] + channel] = lanes[channel, lane].
  static LOCO_HD void transpose_lanes(const Word* lanes, int64_t channels, Word* to, const int64_t* places) {
    if constexpr (L::kWidth % kSquare == 0) {
      for (int64_t lane = 0; lane < L::kWidth; lane += kSquare) {
        const auto* square = reinterpret_cast<const char*>(lanes + lane);
        L::Square::transpose_some(square, kTileLanes * sizeof(Word), channels, to, places + lane);
      }
    } else {
      for (int64_t channel = 0; channel < channels; ++channel) {
        for (int64_t lane = 0; lane < L::kWidth; ++lane)
          to[places[lane] + channel] = lanes[channel * kTileLanes + lane];
      }
    }
  }

  int64_t images() const { return std::min(layout.images, call.to.batch - first_image); }
};

LOCO_KERNELS_END
}  // namespace loco::mixed_conv
