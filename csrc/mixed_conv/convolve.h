// Convolution of bands of rows: all parts, tile by tile.
#pragma once

#include <memory>

#include "mixed_conv/tile.h"

namespace loco::mixed_conv {

constexpr int64_t kBandBytes = 384 << 10;  // less than the second cache, which weights go through too

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
  int64_t first_image, first_row, rows;

  // Of vector `index`.
  Place<L> place(int64_t index) const {
    const int64_t row = index / layout.vectors, vector = index - row * layout.vectors;
    const int64_t column = vector * layout.columns;
    const Images& to = call.to;
    return {copy + row * call.stride[0] * layout.row + vector * L::kWidth,
            static_cast<Word*>(to.data) + first_image * to.batch_stride + (first_row + row) * to.row_stride + column,
            std::min(layout.columns, to.width - column)};
  }

  void store(const Place<L>& place, int64_t channel, typename L::Vec sums) const {
    Word* pixel = place.pixel + channel * call.to.channel_stride;
    if (place.columns == L::kWidth) return L::store(pixel, sums);
    Word lanes[L::kWidth];
    L::store(lanes, sums);
    const int64_t images = std::min(layout.images, call.to.batch - first_image);
    for (int64_t n = 0; n < images; ++n, pixel += call.to.batch_stride)
      spread(lanes + n, layout.images, place.columns, pixel, 1);
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
  LOCO_UNROLL for (int k = 0; k < K; ++k) {
    LOCO_UNROLL for (int v = 0; v < V; ++v) {
      if (band.call.relu) sums[k][v] = sums[k][v] < Vec{} ? Vec{} : sums[k][v];  // a NaN stays
      band.store(places[v], part.channels[kernel + k], sums[k][v]);
    }
  }
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

template <typename L>
void convolve_part(const Band<L>& band, const Part& part, int64_t* offsets) {
  const Convolution& call = band.call;
  const Layout& layout = band.layout;
  const Taps taps{offsets, part.height * part.width, call.from.channels, layout.plane};
  for (int64_t y = 0; y < part.height; ++y) {
    const int64_t row = layout.top - part.top + y * call.dilation[0];
    for (int64_t x = 0; x < part.width; ++x) {
      const int64_t column = layout.left - part.left + x * call.dilation[1];
      *offsets++ =
          row * layout.row + column % call.stride[1] * layout.residue + column / call.stride[1] * layout.images;
    }
  }
  const Shares kernels(part.kernels, L::kKernels), vectors(band.rows * layout.vectors, L::kPixels);
  for (int64_t i = 0; i < kernels.count; ++i) {
    for (int64_t j = 0; j < vectors.count; ++j)
      some<L>(kernels.size(i), vectors.size(j), band, part, taps, kernels.begin(i), vectors.begin(j));
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
  for (const Part* part = call.parts; part < call.parts + call.count; ++part)
    taps = std::max(taps, part->height * part->width);
  char* memory = scratch(taps * sizeof(int64_t) + layout.elements(call) * sizeof(Word));
  auto* offsets = reinterpret_cast<int64_t*>(memory);
  auto* copy = reinterpret_cast<Word*>(memory + taps * sizeof(int64_t));
  for (int64_t item = begin; item < end; ++item) {
    const int64_t image = item / layout.bands * layout.images, row = item % layout.bands * layout.rows;
    const Band<L> band{call, layout, copy, image, row, std::min(layout.rows, call.to.height - row)};
    copy_band(call, layout, image, row, copy);
    for (const Part* part = call.parts; part < call.parts + call.count; ++part) convolve_part(band, *part, offsets);
  }
}

}  // namespace loco::mixed_conv
