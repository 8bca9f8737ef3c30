// Writing the results of a band, and adding to them.
//
//   to[n, o, y, x] = result[n, o, y, x], or, if `add` is given, max(result[n, o, y, x] + add[n, o, y, x], least)
//
// where least is 0 with relu and -infinity without. Results are vectors of interleaved images and columns (band.h). to
// and add are [batch, channels, height, width] with the strides of Images (cpu.h). The thread that computes a band
// writes it: by vectors if columns are contiguous and no images are interleaved, otherwise lane by lane, or, with
// Workspace::results, by transposing squares of lanes and channels.
#pragma once

#include <limits>

#include "mixed_conv/copy.h"
#include "mixed_conv/workspace.h"

namespace loco::mixed_conv {
LOCO_KERNELS_BEGIN

// The band that a thread is computing.
template <typename L>
struct Band {
  using Word = typename L::Word;
  const Convolution& call;
  const BandLayout& layout;
  const Workspace<L>& work;
  int64_t first_image, vectors;

  static constexpr int64_t kTileLanes = Workspace<L>::kTileLanes, kSquare = Workspace<L>::kSquare;

  // Store the results of K filters at vector v of a tile.
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

  // Write the gathered results of a tile, pixel by pixel.
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
        for_pixels(place, [&](int64_t lane, Word* pixel) LOCO_INLINE {
          copy_side_by_side(work.transposed + lane * kSquare, some, pixel + channel);
        });
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

  // Add to the rows that have been written, while they are still in the cache.
  void add(int64_t first_row, int64_t rows) const {
    const Images& to = call.to;
    const int64_t planes = to.by_pixel() ? 1 : to.channels;
    for (int64_t n = first_image; n < first_image + images(); ++n) {
      for (int64_t c = 0; c < planes; ++c) {
        const int64_t place = n * to.batch_stride + c * to.channel_stride + first_row * to.row_stride;
        add_run(static_cast<const Word*>(call.add) + place, rows * to.row_stride, static_cast<Word*>(to.data) + place);
      }
    }
  }

  LOCO_HD void add_run(const Word* __restrict__ from, int64_t count, Word* __restrict__ to) const {
    const Word least = call.relu ? 0 : -std::numeric_limits<Word>::infinity();
    for (int64_t i = 0; i < count; ++i) {
      const Word sum = to[i] + from[i];
      to[i] = sum < least ? least : sum;  // NaN is kept
    }
  }

  int64_t images() const { return std::min(layout.images, call.to.batch - first_image); }
};

LOCO_KERNELS_END
}  // namespace loco::mixed_conv
