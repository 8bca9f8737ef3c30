// Convolution of bands of rows: all parts, tile by tile.
#pragma once

#include <memory>

#include "mixed_conv/tile.h"

namespace loco::mixed_conv {

constexpr int64_t kBandBytes = 384 << 10;  // less than the second cache, which weights go through too
constexpr int64_t kWeightBytes = 512 << 10;

// Where a vector of pixels is read, and where the results for its columns of the first image go.
template <typename L>
struct Place {
  const typename L::Word* from;
  typename L::Word* pixel;
  int64_t columns;
};

// A band that is being computed.
template <typename L>
struct Band {
  using Word = typename L::Word;
  const Convolution& call;
  const Layout& layout;
  const Word* copy;
  Word* results;  // [channels][lanes of a tile], for pixels that are written when all of their channels are there
  int64_t first_image, first_row, rows;

  static constexpr int64_t kTileLanes = L::kPixels * L::kWidth;

  // Of vector `index`.
  Place<L> place(int64_t index) const {
    const int64_t row = index / layout.vectors, vector = index - row * layout.vectors;
    const int64_t column = vector * layout.columns;
    const Images& to = call.to;
    return {copy + row * call.stride[0] * layout.row + vector * L::kWidth,
            static_cast<Word*>(to.data) + first_image * to.batch_stride + (first_row + row) * to.row_stride +
                column * to.column_stride,
            std::min(layout.columns, to.width - column)};
  }

  // The results of K kernels at vector v of a tile.
  template <int K, int V>
  LOCO_HD void store(const Place<L>& place, const int64_t* channels, const typename L::Vec (&sums)[K][V], int v) const {
    const Images& to = call.to;
    if (results) {
      LOCO_UNROLL for (int k = 0; k < K; ++k) L::store(results + channels[k] * kTileLanes + v * L::kWidth, sums[k][v]);
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

  // body(lane, pixel) for those of a vector's lanes that are pixels of the result.
  template <typename Body>
  LOCO_HD void for_pixels(const Place<L>& place, const Body& body) const {
    const int64_t images = std::min(layout.images, call.to.batch - first_image);
    for (int64_t n = 0; n < images; ++n) {
      Word* pixel = place.pixel + n * call.to.batch_stride;
      for (int64_t column = 0; column < place.columns; ++column, pixel += call.to.column_stride)
        body(column * layout.images + n, pixel);
    }
  }

  // Results of a tile, by pixel. `turned` has room for all channels of a vector's pixels.
  void write_pixels(int64_t index, int64_t vectors, Word* turned) const {
    constexpr int64_t kSquare = L::Square::kSize;
    const int64_t channels = call.to.channels;
    for (int64_t v = 0; v < vectors; ++v) {
      const Word* lanes = results + v * L::kWidth;
      int64_t channel = 0;
      if constexpr (L::kWidth % kSquare == 0) {
        for (; channel + kSquare <= channels; channel += kSquare) {
          for (int64_t lane = 0; lane < L::kWidth; lane += kSquare)
            L::Square::template transpose<Word>(reinterpret_cast<const char*>(lanes + channel * kTileLanes + lane),
                                                kTileLanes * sizeof(Word), turned + lane * channels + channel,
                                                channels);
        }
      }
      for (; channel < channels; ++channel)
        spread(lanes + channel * kTileLanes, 1, L::kWidth, turned + channel, channels);
      for_pixels(place(index + v),
                 [&](int64_t lane, Word* pixel) { copy_whole_row(turned + lane * channels, channels, pixel); });
    }
  }
};

// Functions of their own: all tiles in one would be too much for the compiler's registers.
template <typename L, int K, int V>
__attribute__((noinline)) void tile(const Band<L>& band, const Part& part, const Taps& taps, int64_t kernel,
                                    int64_t index) {
  using Word = typename L::Word;
  using Vec = typename L::Vec;
  Place<L> places[V];
  const Word* at[V];
  Vec sums[K][V];
  LOCO_UNROLL for (int v = 0; v < V; ++v) places[v] = band.place(index + v), at[v] = places[v].from;
  LOCO_UNROLL for (int k = 0; k < K; ++k) {
    const Word none = 0, *bias = part.bias ? static_cast<const Word*>(part.bias) + kernel + k : &none;
    LOCO_UNROLL for (int v = 0; v < V; ++v) sums[k][v] = L::broadcast(reinterpret_cast<const char*>(bias));
  }
  const Word* weight = static_cast<const Word*>(part.weight) + kernel * taps.channels * taps.count;
  multiply<L, K, V>(taps, weight, at, sums);
  if (band.call.relu) {
    LOCO_UNROLL for (int k = 0; k < K; ++k) {
      LOCO_UNROLL for (int v = 0; v < V; ++v) sums[k][v] = sums[k][v] < Vec{} ? Vec{} : sums[k][v];  // a NaN stays
    }
  }
  LOCO_UNROLL for (int v = 0; v < V; ++v) band.store(places[v], part.channels + kernel, sums, v);
}

// Calls tile with these numbers of kernels and vectors, known to the compiler.
template <typename L, int K = L::kKernels, int V = L::kPixels>
void some(int64_t kernels, int64_t vectors, const Band<L>& band, const Part& part, const Taps& taps, int64_t kernel,
          int64_t index) {
  if constexpr (K > 1) {
    if (kernels < K) return some<L, K - 1, V>(kernels, vectors, band, part, taps, kernel, index);
  }
  if constexpr (V > 1) {
    if (vectors < V) return some<L, K, V - 1>(kernels, vectors, band, part, taps, kernel, index);
  }
  tile<L, K, V>(band, part, taps, kernel, index);
}

// `total` things in as few shares of `most` as can be, which differ by one at most.
struct Shares {
  int64_t total, count;

  Shares(int64_t total, int64_t most) : total(total), count((total + most - 1) / most) {}
  int64_t begin(int64_t share) const { return total * share / count; }
  int64_t size(int64_t share) const { return begin(share + 1) - begin(share); }
};

// Where the taps of all parts read, one part after the other.
inline void fill_offsets(const Convolution& call, const Layout& layout, int64_t* offsets) {
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

// All kernels at the vectors of pixels from `begin` on, in shares. Kernels of a share are computed at all of them
// before the next ones, whose weights take the cache's place of theirs.
template <typename L>
void convolve_vectors(const Band<L>& band, const int64_t* offsets, int64_t begin, int64_t count) {
  const Convolution& call = band.call;
  const Shares vectors(count, L::kPixels);
  for (const Part* part = call.parts; part < call.parts + call.count; ++part) {
    const Taps taps{offsets, part->height * part->width, call.from.channels, band.layout.plane};
    const Shares kernels(part->kernels, L::kKernels);
    for (int64_t i = 0; i < kernels.count; ++i) {
      for (int64_t j = 0; j < vectors.count; ++j)
        some<L>(kernels.size(i), vectors.size(j), band, *part, taps, kernels.begin(i), begin + vectors.begin(j));
    }
    offsets += taps.count;
  }
}

// Where channels lie side by side, kernels write to the same lines of memory: results wait for each other then, if the
// cache holds all weights.
template <typename L>
bool writes_whole_pixels(const Convolution& call) {
  int64_t weights = 0;
  for (const Part* part = call.parts; part < call.parts + call.count; ++part)
    weights += part->kernels * part->height * part->width * call.from.channels;
  return call.to.by_pixel() && weights * static_cast<int64_t>(sizeof(typename L::Word)) <= kWeightBytes;
}

template <typename L>
void convolve_band(const Band<L>& band, const int64_t* offsets, typename L::Word* turned) {
  const int64_t count = band.rows * band.layout.vectors;
  if (!band.results) return convolve_vectors(band, offsets, 0, count);
  const Shares tiles(count, L::kPixels);
  for (int64_t i = 0; i < tiles.count; ++i) {
    convolve_vectors(band, offsets, tiles.begin(i), tiles.size(i));
    band.write_pixels(tiles.begin(i), tiles.size(i), turned);
  }
}

template <typename L>
int64_t convolve_items(const Convolution& call) {
  const Layout layout = layout_of(call, L::kWidth, kBandBytes / sizeof(typename L::Word));
  return layout.groups(call) * layout.bands;
}

// Memory that the thread keeps for its next call.
inline char* scratch(int64_t bytes) {
  constexpr uintptr_t kLine = 64;
  struct Kept {
    std::unique_ptr<char[]> data;
    int64_t bytes = 0;
  };
  thread_local Kept kept;
  if (kept.bytes < bytes) {
    kept.bytes = 0;
    kept.data.reset(new char[bytes + kLine]);
    kept.bytes = bytes;
  }
  char* data = kept.data.get();
  return data + (kLine - reinterpret_cast<uintptr_t>(data) % kLine) % kLine;
}

template <typename L>
void convolve_range(const Convolution& call, int64_t begin, int64_t end) {
  using Word = typename L::Word;
  const Layout layout = layout_of(call, L::kWidth, kBandBytes / sizeof(Word));
  int64_t taps = 0;
  for (const Part* part = call.parts; part < call.parts + call.count; ++part) taps += part->height * part->width;
  const bool whole_pixels = writes_whole_pixels<L>(call);
  const int64_t results = whole_pixels ? call.to.channels * Band<L>::kTileLanes : 0;
  const int64_t turned = whole_pixels ? call.to.channels * L::kWidth : 0;
  char* memory = scratch((layout.elements(call) + results + turned) * sizeof(Word) + taps * sizeof(int64_t));
  auto* copy = reinterpret_cast<Word*>(memory);
  Word* const end_of_copy = copy + layout.elements(call);
  auto* offsets = reinterpret_cast<int64_t*>(end_of_copy + results + turned);
  fill_offsets(call, layout, offsets);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t image = item / layout.bands * layout.images, row = item % layout.bands * layout.rows;
    const int64_t rows = std::min(layout.rows, call.to.height - row);
    const Band<L> band{call, layout, copy, whole_pixels ? end_of_copy : nullptr, image, row, rows};
    copy_band<L>(call, layout, image, row, copy);
    convolve_band(band, offsets, end_of_copy + results);
  }
}

}  // namespace loco::mixed_conv
