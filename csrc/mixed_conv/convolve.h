// Convolution of bands of rows: all parts, tile by tile.
#pragma once

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
  int64_t first_image, vectors;
  const Place<L>* places;  // of its vectors
  // [channels that fill squares][lanes of a tile] and [lanes of a vector][channels of a square], for pixels that are
  // written when all of their channels are there; null otherwise.
  Word *results, *turned;

  static constexpr int64_t kTileLanes = L::kPixels * L::kWidth, kSquare = L::Square::kSize;

  static int64_t in_squares(int64_t channels) { return (channels + kSquare - 1) / kSquare * kSquare; }

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

  // Results of a tile, by pixel.
  void write_pixels(int64_t index, int64_t count) const {
    for (int64_t v = 0; v < count; ++v) {
      const Place<L>& place = places[index + v];
      const bool adjacent = layout.images == 1 && place.columns == L::kWidth;
      for (int64_t channel = 0; channel < call.to.channels; channel += kSquare) {
        const int64_t some = std::min(kSquare, call.to.channels - channel);
        const Word* lanes = results + channel * kTileLanes + v * L::kWidth;
        if (adjacent) {
          turn(lanes, some, place.pixel + channel, call.to.column_stride);
          continue;
        }
        turn(lanes, some, turned, kSquare);
        for_pixels(place, [&](int64_t lane, Word* pixel)
                              LOCO_INLINE { copy_side_by_side(turned + lane * kSquare, some, pixel + channel); });
      }
    }
  }

  // to[lane * stride + channel] = the channel's lane
  static LOCO_HD void turn(const Word* lanes, int64_t channels, Word* to, int64_t stride) {
    if constexpr (L::kWidth % kSquare == 0) {
      for (int64_t lane = 0; lane < L::kWidth; lane += kSquare) {
        const auto* square = reinterpret_cast<const char*>(lanes + lane);
        if (channels == kSquare) {
          L::Square::transpose(square, kTileLanes * sizeof(Word), to + lane * stride, stride);
        } else {
          L::Square::transpose_some(square, kTileLanes * sizeof(Word), channels, to + lane * stride, stride);
        }
      }
    } else {
      for (int64_t channel = 0; channel < channels; ++channel)
        spread(lanes + channel * kTileLanes, 1, L::kWidth, to + channel, stride);
    }
  }
};

// Where the vectors of `rows` rows are, row by row.
template <typename L>
void fill_places(const Convolution& call, const Layout& layout, const typename L::Word* copy, int64_t first_image,
                 int64_t first_row, int64_t rows, Place<L>* places) {
  const Images& to = call.to;
  auto* row = static_cast<typename L::Word*>(to.data) + first_image * to.batch_stride + first_row * to.row_stride;
  for (int64_t y = 0; y < rows; ++y, row += to.row_stride, copy += call.stride[0] * layout.row) {
    for (int64_t vector = 0; vector < layout.vectors; ++vector) {
      const int64_t column = vector * layout.columns;
      *places++ = {copy + vector * L::kWidth, row + column * to.column_stride,
                   std::min(layout.columns, to.width - column)};
    }
  }
}

// Functions of their own: all tiles in one would be too much for the compiler's registers.
template <typename L, int K, int V>
__attribute__((noinline)) void tile(const Band<L>& band, const Part& part, const Taps& taps, int64_t kernel,
                                    int64_t index) {
  using Word = typename L::Word;
  using Vec = typename L::Vec;
  const Place<L>* places = band.places + index;
  const Word* at[V];
  Vec sums[K][V];
  LOCO_UNROLL for (int v = 0; v < V; ++v) at[v] = places[v].from;
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
void convolve_band(const Band<L>& band, const int64_t* offsets) {
  if (!band.results) return convolve_vectors(band, offsets, 0, band.vectors);
  const Shares tiles(band.vectors, L::kPixels);
  for (int64_t i = 0; i < tiles.count; ++i) {
    convolve_vectors(band, offsets, tiles.begin(i), tiles.size(i));
    band.write_pixels(tiles.begin(i), tiles.size(i));
  }
}

template <typename L>
int64_t convolve_items(const Convolution& call) {
  const Layout layout = layout_of(call, L::kWidth, kBandBytes / sizeof(typename L::Word));
  return layout.groups(call) * layout.bands;
}

// What a thread needs for its bands, side by side in its scratch.
template <typename L>
struct Workspace {
  using Word = typename L::Word;
  Word *copy, *results = nullptr, *turned = nullptr;
  Place<L>* places;
  int64_t* offsets;

  Workspace(const Convolution& call, const Layout& layout) {
    const int64_t channels = writes_whole_pixels<L>(call) ? Band<L>::in_squares(call.to.channels) : 0;
    const int64_t copied = layout.elements(call), waiting = channels * Band<L>::kTileLanes;
    const int64_t words = copied + waiting + Band<L>::kSquare * L::kWidth, vectors = layout.rows * layout.vectors;
    int64_t taps = 0;
    for (const Part* part = call.parts; part < call.parts + call.count; ++part) taps += part->height * part->width;
    copy = static_cast<Word*>(scratch(words * sizeof(Word) + vectors * sizeof(Place<L>) + taps * sizeof(int64_t)));
    if (channels) results = copy + copied, turned = results + waiting;
    std::memset(copy, 0, copied * sizeof(Word));  // columns outside the images stay so
    places = reinterpret_cast<Place<L>*>(copy + words);
    offsets = reinterpret_cast<int64_t*>(places + vectors);
    fill_offsets(call, layout, offsets);
  }
};

template <typename L>
void convolve_range(const Convolution& call, int64_t begin, int64_t end) {
  const Layout layout = layout_of(call, L::kWidth, kBandBytes / sizeof(typename L::Word));
  const Workspace<L> work(call, layout);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t image = item / layout.bands * layout.images, row = item % layout.bands * layout.rows;
    const int64_t rows = std::min(layout.rows, call.to.height - row);
    copy_band<L>(call, layout, image, row, work.copy);
    fill_places<L>(call, layout, work.copy, image, row, rows, work.places);
    convolve_band<L>({call, layout, image, rows * layout.vectors, work.places, work.results, work.turned},
                     work.offsets);
  }
}

}  // namespace loco::mixed_conv
