// Convolution by filters of several sizes.
//
//   to[n, o, y, x] = bias[o] + sum over channels c and taps (i, j) of weight[o, c, i, j] *
//       from[n, c, y * stride + i * dilation - top, x * stride + j * dilation - left]
//
// A part is the set of filters of one size; its weight is contiguous [filters, channels in, height, width] and its bias
// [filters]; o is its channels[filter]. from and to are [batch, channels, height, width] with the strides of Images
// (cpu.h), and pixels outside of `from` are zero.
//
// An item is a band: some rows of the result, for as many images as are interleaved (band.h). The thread that has it
// copies the pixels that the band depends on (copy.h), and then computes tiles of L::kFilters filters by L::kPixels
// vectors of pixels, whose sums stay in registers, part by part. In a tile a weight is read once for all vectors, and
// no MACs are spent on taps that a smaller filter does not have.
#include "common/vec.h"
#include "mixed_conv/write.h"

namespace loco::mixed_conv {
LOCO_KERNELS_BEGIN

constexpr int64_t kBandBytes = 384 << 10;  // less than the L2 cache, which the weights pass through, too

// Offsets of a part's taps, [count], relative to a vector's place in the copy of the band, whose channels are `plane`
// elements apart.
struct Taps {
  const int64_t* offsets;
  int64_t count, channels, plane;
};

// Add weight[k][channel][tap] times vector v there to sums[k][v], in the order of channels, then taps. weight is
// contiguous [filters, channels, taps]; at[v] points to vector v in the copy of the band. Each channel's pixels are
// prefetched while those of the channel before are multiplied.
template <typename L, int K, int V>
LOCO_HD void multiply(const Taps& taps, const typename L::Word* weight, const typename L::Word* const (&at)[V],
                      typename L::Vec (&sums)[K][V]) {
  const int64_t per_filter = taps.channels * taps.count, next_first = taps.plane + taps.offsets[0];
  const int64_t next_last = taps.plane + taps.offsets[taps.count - 1] + L::kWidth - 1;
  for (int64_t channel = 0; channel < taps.channels; ++channel) {
    const int64_t plane = channel * taps.plane;
    LOCO_UNROLL for (int v = 0; v < V; ++v) {
      __builtin_prefetch(at[v] + plane + next_first);
      __builtin_prefetch(at[v] + plane + next_last);
    }
    for (int64_t tap = 0; tap < taps.count; ++tap, ++weight) {
      typename L::Vec pixels[V];
      LOCO_UNROLL for (int v = 0; v < V; ++v) pixels[v] = L::load(at[v] + plane + taps.offsets[tap]);
      LOCO_UNROLL for (int k = 0; k < K; ++k) {
        const auto factor = L::broadcast(reinterpret_cast<const char*>(weight + k * per_filter));
        LOCO_UNROLL for (int v = 0; v < V; ++v) sums[k][v] = L::multiply_add(factor, pixels[v], sums[k][v]);
      }
    }
  }
}

template <typename L>
void fill_places(const Convolution& call, const BandLayout& layout, const typename L::Word* copy, int64_t first_image,
                 int64_t first_row, int64_t rows, PixelPlace<L>* places) {
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

// This must not be inlined: with all tiles in one function, the compiler would run out of registers.
template <typename L, int K, int V>
__attribute__((noinline)) void tile(const Band<L>& band, const Part& part, const Taps& taps, int64_t filter,
                                    int64_t index) {
  using Word = typename L::Word;
  using Vec = typename L::Vec;
  const PixelPlace<L>* places = band.work.places + index;
  const Word* at[V];
  Vec sums[K][V];
  LOCO_UNROLL for (int v = 0; v < V; ++v) at[v] = places[v].from;
  LOCO_UNROLL for (int k = 0; k < K; ++k) {
    const Word none = 0, *bias = part.bias ? static_cast<const Word*>(part.bias) + filter + k : &none;
    LOCO_UNROLL for (int v = 0; v < V; ++v) sums[k][v] = L::broadcast(reinterpret_cast<const char*>(bias));
  }
  const Word* weight = static_cast<const Word*>(part.weight) + filter * taps.channels * taps.count;
  multiply<L, K, V>(taps, weight, at, sums);
  LOCO_UNROLL for (int v = 0; v < V; ++v) band.store(places[v], part.channels + filter, sums, v);
}

// Call tile with these numbers of filters and vectors as template arguments.
template <typename L, int K = L::kFilters, int V = L::kPixels>
void some(int64_t filters, int64_t vectors, const Band<L>& band, const Part& part, const Taps& taps, int64_t filter,
          int64_t index) {
  if constexpr (K > 1) {
    if (filters < K) return some<L, K - 1, V>(filters, vectors, band, part, taps, filter, index);
  }
  if constexpr (V > 1) {
    if (vectors < V) return some<L, K, V - 1>(filters, vectors, band, part, taps, filter, index);
  }
  tile<L, K, V>(band, part, taps, filter, index);
}

// Divides `total` things into as few shares of at most `most` as possible, whose sizes differ by at most one.
struct Shares {
  int64_t total, count;

  Shares(int64_t total, int64_t most) : total(total), count((total + most - 1) / most) {}
  int64_t begin(int64_t share) const { return total * share / count; }
  int64_t size(int64_t share) const { return begin(share + 1) - begin(share); }
};

// Compute a band. The filters of one share are computed at all vectors before the next share, whose weights then
// replace theirs in the cache.
template <typename L>
void convolve_band(const Band<L>& band) {
  const Convolution& call = band.call;
  const int64_t* offsets = band.work.offsets;
  const Shares vectors(band.vectors, L::kPixels);
  for (const Part* part = call.parts; part < call.parts + call.count; ++part) {
    const Taps taps{offsets, part->height * part->width, call.from.channels, band.layout.plane};
    const Shares filters(part->filters, L::kFilters);
    for (int64_t i = 0; i < filters.count; ++i) {
      for (int64_t j = 0; j < vectors.count; ++j)
        some<L>(filters.size(i), vectors.size(j), band, *part, taps, filters.begin(i), vectors.begin(j));
    }
    offsets += taps.count;
  }
}

template <typename L>
int64_t convolve_items(const Convolution& call) {
  const BandLayout layout = layout_of(call, L::kWidth, kBandBytes / sizeof(typename L::Word));
  return layout.groups(call) * layout.bands;
}

template <typename L>
void convolve_range(const Convolution& call, int64_t begin, int64_t end) {
  const BandLayout layout = layout_of(call, L::kWidth, kBandBytes / sizeof(typename L::Word));
  const Workspace<L> work(call, layout);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t image = item / layout.bands * layout.images, row = item % layout.bands * layout.rows;
    const int64_t rows = std::min(layout.rows, call.to.height - row);
    copy_band<L>(call, layout, image, row, work.copy);
    fill_places<L>(call, layout, work.copy, image, row, rows, work.places);
    convolve_band(Band<L>{call, layout, work, image, rows * layout.vectors});
  }
}

// An arithmetic with the size of its tiles: the most filters and vectors of pixels whose sums fit into registers.
template <typename T>
struct Tiled : Lanes<T> {
  static constexpr int kFilters = kVectorBytes > 16 ? 6 : 4, kPixels = Lanes<T>::kVectors;
};

const ConvolutionKernels convolutions{{{convolve_items<Tiled<double>>, convolve_range<Tiled<double>>},
                                       {convolve_items<Tiled<float>>, convolve_range<Tiled<float>>}}};

LOCO_KERNELS_END
}  // namespace loco::mixed_conv
