// Blocks of one element: every channel has a matrix of its own, as in a depthwise convolution, and vectors lie along
// the channels. Elements are converted as they are read.
//
// Where rows read the same pixels, a product copies what some rows read of few samples, one vector of channels at a
// time, into a window: in the tensor, pixels lie so far apart, and often at such even distances, that the first cache
// would not hold them until the next row. Value gradients take the batch in small parts for the same reason.
#pragma once

#include <cstring>
#include <type_traits>

#include "block_sparse/panels.h"

namespace loco::block_sparse {

constexpr int kDepthwiseSamples = 11;          // whose sums stay in registers
constexpr int64_t kDepthwiseBatch = 12;        // of value gradients
constexpr int64_t kDepthwiseSums = 16384;      // of value gradients that wait for the rest of the batch
constexpr int64_t kDepthwiseWindow = 1 << 19;  // bytes at most
constexpr int64_t kDepthwiseReads = 3;         // of a pixel, from which on a window pays
constexpr int64_t kDepthwiseAhead = 16;        // pixels

// Elements of a type, in vectors of an arithmetic; where not whole, only the first `count` are there. Which elements a
// vector holds is the arithmetic's to say where there are two.
template <typename A, DType type>
struct Elements {
  using Arithmetic = A;
  using Vec = typename A::Vec;
  using Acc = typename A::Acc;
  using Storage = std::conditional_t<type == DType::bf16 || type == DType::f16, uint16_t, Acc>;
  static constexpr bool kPlain = std::is_same_v<Storage, Acc>;
  using Square = std::conditional_t<kPlain, typename A::Square, PlainSquare<A>>;
  // Of a tile: those of half precision take a line, too, where registers allow it.
  static constexpr int kVectors = A::kVectors > 2 && !kPlain ? 2 : 1;

  template <int vectors, bool whole>
  static LOCO_INLINE void read(const Storage* at, int64_t count, Vec (&to)[vectors]) {
    constexpr int kCount = vectors * A::kWidth;
    Storage some[kCount] = {};
    if constexpr (!whole) {
      for (int64_t i = 0; i < least(count, kCount); ++i) some[i] = at[i];
      at = some;
    }
    if constexpr (type == DType::bf16 && vectors == 2) {
      A::split(at, to);
    } else {
      LOCO_UNROLL for (int j = 0; j < vectors; ++j) to[j] = read_vector(at + j * A::kWidth);
    }
  }

  template <int vectors, bool whole>
  static LOCO_INLINE void write(Storage* at, int64_t count, const Vec (&from)[vectors]) {
    if constexpr (type == DType::bf16 && vectors == 2) {
      A::join(from, at);
    } else if constexpr (whole && kPlain) {
      LOCO_UNROLL for (int j = 0; j < vectors; ++j) A::store(at + j * A::kWidth, from[j]);
    } else {
      Acc wide[vectors * A::kWidth];
      LOCO_UNROLL for (int j = 0; j < vectors; ++j) A::store(wide + j * A::kWidth, from[j]);
      if constexpr (whole) {
        LOCO_UNROLL for (int j = 0; j < vectors; ++j) narrow(wide + j * A::kWidth, at + j * A::kWidth);
      } else {
        store(type, wide, at, least(count, vectors * A::kWidth));
      }
    }
  }

 private:
  static LOCO_INLINE Vec read_vector(const Storage* at) {
    if constexpr (kPlain) {
      return A::load(at);
    } else if constexpr (type == DType::f16) {
      return A::load_f16(at);
    } else {
      Acc wide[A::kWidth];
      for (int i = 0; i < A::kWidth; ++i) wide[i] = bf16_to_float(at[i]);
      return A::load(wide);
    }
  }

  // By itself, for the compiler to see that it is a loop.
  __attribute__((noinline)) static void narrow(const Acc* from, Storage* to) {
    for (int i = 0; i < A::kWidth; ++i) to[i] = type == DType::f16 ? float_to_f16(from[i]) : float_to_bf16(from[i]);
  }
};

// What a row's sums start from.
template <typename E, int vectors, bool whole>
LOCO_HD void depthwise_start(const Product& call, int64_t row, int64_t channel, typename E::Vec (&to)[vectors]) {
  const typename E::Acc zeros[E::Arithmetic::kWidth] = {};
  LOCO_UNROLL for (int j = 0; j < vectors; ++j) to[j] = E::Arithmetic::load(zeros);
  if (!call.bias) return;
  const auto* bias = static_cast<const typename E::Storage*>(call.bias) + row * call.groups + channel;
  E::template read<vectors, whole>(bias, call.groups - channel, to);
}

// Pixels from `begin` to before `end`, or none.
struct Span {
  int64_t begin = INT64_MAX, end = 0;

  LOCO_HD int64_t length() const { return end > begin ? end - begin : 0; }
  LOCO_HD void join(Span other) {
    begin = least(begin, other.begin);
    end = end > other.end ? end : other.end;
  }
};

// From one pixel of a copy to the next, in vectors of channels: an odd number, for pixels below each other to be held
// by different sets of the cache.
constexpr int64_t depthwise_stride(int64_t samples) { return samples | 1; }

// What tiles read: some samples and vectors of channels of some pixels, in the tensor or copied from there.
template <typename E>
struct Window {
  const typename E::Storage* data;  // of pixel 0, be it there or not
  int64_t batch, samples, channel;
};

// The sums of one row. Copies are [pixel][sample][channel], zeros behind the last channel.
template <typename E, int samples, int vectors, bool whole, bool copied>
void depthwise_tile(const Product& call, const Window<E>& window, int64_t row) {
  using A = typename E::Arithmetic;
  using Storage = typename E::Storage;
  constexpr int kWidth = A::kWidth;
  const int64_t count = call.groups - window.channel;
  const auto* const values = static_cast<const Storage*>(call.values) + window.channel;
  const int64_t sample_stride = copied ? vectors * kWidth : call.from.batch_stride;
  const int64_t pixel_stride = copied ? depthwise_stride(samples) * sample_stride : call.from.pixel_stride;
  typename A::Vec sums[samples][vectors], x[vectors], v[vectors];
  depthwise_start<E, vectors, whole>(call, row, window.channel, v);
  LOCO_UNROLL for (int i = 0; i < samples; ++i) { LOCO_UNROLL for (int j = 0; j < vectors; ++j) sums[i][j] = v[j]; }
  const int64_t end = call.first[row + 1];
  for (int64_t entry = call.first[row]; entry < end; ++entry) {
    const auto* const pixel = window.data + call.source[entry] * pixel_stride;
    const auto* const value = values + (call.blocks ? call.blocks[entry] : entry) * call.groups;
    E::template read<vectors, whole>(value, count, v);
    LOCO_UNROLL for (int i = 0; i < samples; ++i) {
      E::template read<vectors, whole || copied>(pixel + i * sample_stride, count, x);
      LOCO_UNROLL for (int j = 0; j < vectors; ++j) sums[i][j] = A::multiply_add(x[j], v[j], sums[i][j]);
    }
  }
  auto* to = static_cast<Storage*>(call.to.data) + window.batch * call.to.batch_stride + row * call.to.pixel_stride +
             window.channel;
  LOCO_UNROLL for (int i = 0; i < samples; ++i) {
    E::template write<vectors, whole>(to + i * call.to.batch_stride, count, sums[i]);
  }
}

// One sample of a window, `width` channels; of the tensor, the channels of a pixel or its pixels lie side by side.
template <typename E, int width, bool whole>
void depthwise_fill(const Product& call, Span span, int64_t batch, int64_t channel, typename E::Storage* to,
                    int64_t to_row) {
  using Storage = typename E::Storage;
  const Pixels& pixels = call.from;
  const int64_t count = whole ? width : call.groups - channel, length = span.length();
  const auto* from = static_cast<const Storage*>(pixels.data) + batch * pixels.batch_stride +
                     channel * pixels.channel_stride + span.begin * pixels.pixel_stride;
  const bool by_pixel = pixels.channel_stride == 1;
  if (!by_pixel) {
    transpose<typename E::Square>(reinterpret_cast<const char*>(from), pixels.channel_stride * sizeof(Storage), count,
                                  length, to, to_row);
    if (whole) return;
  }
  for (int64_t at = 0; at < length; ++at, from += pixels.pixel_stride, to += to_row) {
    if (by_pixel) std::memcpy(to, from, count * sizeof(Storage));
    if constexpr (!whole) std::memset(to + count, 0, (width - count) * sizeof(Storage));
    if (at + kDepthwiseAhead < length) __builtin_prefetch(from + kDepthwiseAhead * pixels.pixel_stride, 0, 2);
  }
}

// Brings the values of a row into cache.
template <typename E>
void depthwise_fetch(const Product& call, int64_t channel, int64_t row) {
  const auto* values = static_cast<const typename E::Storage*>(call.values) + channel;
  const int64_t end = call.first[least(row + 1, call.rows)];
  for (int64_t entry = call.first[least(row, call.rows)]; entry < end; ++entry) {
    __builtin_prefetch(values + (call.blocks ? call.blocks[entry] : entry) * call.groups, 0, 2);
  }
}

// Rows `row` to before `last`, which read the pixels of `span`; copied to `memory`, or from the tensor.
template <typename E, int vectors, bool whole, bool copied, int samples = kDepthwiseSamples>
void depthwise_rows(const Product& call, Window<E> window, Span span, typename E::Storage* memory, int64_t row,
                    int64_t last) {
  if constexpr (samples > 1) {
    if (window.samples < samples) {
      return depthwise_rows<E, vectors, whole, copied, samples - 1>(call, window, span, memory, row, last);
    }
  }
  if constexpr (copied) {
    constexpr int kChannels = vectors * E::Arithmetic::kWidth, kPixel = depthwise_stride(samples) * kChannels;
    window.data = memory - span.begin * kPixel;
    for (int64_t i = 0; i < samples; ++i) {
      depthwise_fill<E, kChannels, whole>(call, span, window.batch + i, window.channel, memory + i * kChannels, kPixel);
    }
  } else {
    window.data = static_cast<const typename E::Storage*>(call.from.data) + window.batch * call.from.batch_stride +
                  window.channel;
  }
  for (; row < last; ++row) {
    depthwise_fetch<E>(call, window.channel, row + 2);
    depthwise_tile<E, samples, vectors, whole, copied>(call, window, row);
  }
}

// The pixels that each row reads, and what windows are to be made of them.
template <typename E>
class DepthwiseWindows {
  static constexpr int64_t kPixel =
      depthwise_stride(kDepthwiseSamples) * E::kVectors * E::Arithmetic::kWidth * sizeof(typename E::Storage);
  static constexpr int64_t kUsual = kDepthwiseWindow / kPixel;

 public:
  explicit DepthwiseWindows(const Product& call) : rows_(call.rows), spans_(call.rows) {
    Span all;
    int64_t widest = 0;
    for (int64_t row = 0; row < rows_; ++row) {
      const Span span = (&*spans_)[row] = read_by(call, row);
      all.join(span);
      widest = span.length() > widest ? span.length() : widest;
    }
    const bool pays = widest <= 2 * kUsual && call.first[rows_] >= kDepthwiseReads * all.length();
    // What lies by channel has to be copied.
    copied_ = pays || call.from.channel_stride != 1;
    most_ = widest <= kUsual ? least(all.length(), kUsual) : pays ? widest : least(all.length(), 2 * widest);
  }

  bool copied() const { return copied_; }
  int64_t bytes() const { return copied_ ? most_ * kPixel : 0; }

  // From `row` on, the end of the rows before `last` whose pixels are read together: those of `span`.
  int64_t end(int64_t row, int64_t last, Span& span) const {
    for (Span wider; row < least(rows_, last); ++row) {
      wider.join((&*spans_)[row]);
      if (copied_ && wider.length() > most_) break;
      if (wider.length() > 0) span = wider;
    }
    return row;
  }

 private:
  static Span read_by(const Product& call, int64_t row) {
    int64_t lowest = INT64_MAX, highest = -1;
    for (int64_t entry = call.first[row]; entry < call.first[row + 1]; ++entry) {
      const int64_t pixel = call.source[entry];
      lowest = pixel < lowest ? pixel : lowest;
      highest = pixel > highest ? pixel : highest;
    }
    return {lowest, highest + 1};
  }

  const int64_t rows_;
  const Memory<Span> spans_;
  bool copied_;
  int64_t most_;
};

// Channels go in tiles of kVectors, and then of one vector.
template <typename E>
struct DepthwiseTiles {
  static constexpr int64_t kWidth = E::Arithmetic::kWidth, kWide = kWidth * E::kVectors;
  int64_t channels, wide, count;

  explicit DepthwiseTiles(int64_t all)
      : channels(all), wide(channels / kWide), count(wide + pieces(channels % kWide, kWidth)) {}
  int64_t channel(int64_t tile) const { return tile < wide ? tile * kWide : wide * kWide + (tile - wide) * kWidth; }
  bool whole(int64_t channel) const { return channel + kWidth <= channels; }
};

template <typename E, bool copied>
auto depthwise_rows_of(bool wide, bool whole) {
  return wide    ? depthwise_rows<E, E::kVectors, true, copied>
         : whole ? depthwise_rows<E, 1, true, copied>
                 : depthwise_rows<E, 1, false, copied>;
}

template <typename E>
int64_t depthwise_items(const Product& call) {
  return call.rows * DepthwiseTiles<E>(call.groups).count * pieces(call.batch, kDepthwiseSamples);
}

// Items are the rows of `to` for one tile of channels, then for the next, of one part of the batch, then of the next.
template <typename E>
void depthwise_range(const Product& call, int64_t begin, int64_t end) {
  const DepthwiseTiles<E> tiles(call.groups);
  const DepthwiseWindows<E> windows(call);
  const int64_t parts = pieces(call.batch, kDepthwiseSamples);
  const Memory<typename E::Storage> memory(windows.bytes() / sizeof(typename E::Storage));
  for (int64_t item = begin; item < end;) {
    const int64_t row = item % call.rows, part = item / call.rows, tile = part % tiles.count;
    const int64_t batch = part / tiles.count * call.batch / parts, next = (part / tiles.count + 1) * call.batch / parts;
    const Window<E> window{nullptr, batch, next - batch, tiles.channel(tile)};
    Span span{0, 0};  // where no row reads any
    const int64_t last = windows.end(row, row + end - item, span);
    const auto rows = windows.copied() ? depthwise_rows_of<E, true> : depthwise_rows_of<E, false>;
    rows(tile < tiles.wide, tiles.whole(window.channel))(call, window, span, &*memory, row, last);
    item += last - row;
  }
}

// Sums of an entry: whole vectors.
template <typename E>
int64_t depthwise_sums_row(const ValueGradient& call) {
  return pieces(call.groups, E::Arithmetic::kWidth) * E::Arithmetic::kWidth;
}

// Of some entries of one row and some vectors of channels, over a part of the batch.
template <typename E, int entries, int vectors, bool whole>
void depthwise_gradient_tile(const ValueGradient& call, const int64_t* source, int64_t row, int64_t batch,
                             int64_t batch_end, int64_t channel, typename E::Acc* sums) {
  using A = typename E::Arithmetic;
  using Storage = typename E::Storage;
  const int64_t count = call.groups - channel, sums_row = depthwise_sums_row<E>(call);
  typename A::Vec total[entries][vectors], left[vectors], right[vectors];
  LOCO_UNROLL for (int i = 0; i < entries; ++i) {
    LOCO_UNROLL for (int j = 0; j < vectors; ++j) total[i][j] = A::load(sums + i * sums_row + j * A::kWidth);
  }
  for (int64_t n = batch; n < batch_end; ++n) {
    const auto* to =
        static_cast<const Storage*>(call.to.data) + n * call.to.batch_stride + row * call.to.pixel_stride + channel;
    const auto* from = static_cast<const Storage*>(call.from.data) + n * call.from.batch_stride + channel;
    E::template read<vectors, whole>(to, count, right);
    LOCO_UNROLL for (int i = 0; i < entries; ++i) {
      E::template read<vectors, whole>(from + source[i] * call.from.pixel_stride, count, left);
      LOCO_UNROLL for (int j = 0; j < vectors; ++j) total[i][j] = A::multiply_add(left[j], right[j], total[i][j]);
    }
  }
  LOCO_UNROLL for (int i = 0; i < entries; ++i) {
    LOCO_UNROLL for (int j = 0; j < vectors; ++j) A::store(sums + i * sums_row + j * A::kWidth, total[i][j]);
  }
}

// The same of all channels.
template <typename E, int entries>
void depthwise_gradient_channels(const ValueGradient& call, const int64_t* source, int64_t row, int64_t batch,
                                 int64_t batch_end, typename E::Acc* sums) {
  const DepthwiseTiles<E> tiles(call.groups);
  for (int64_t tile = 0; tile < tiles.count; ++tile) {
    const int64_t channel = tiles.channel(tile);
    const auto run = tile < tiles.wide      ? depthwise_gradient_tile<E, entries, E::kVectors, true>
                     : tiles.whole(channel) ? depthwise_gradient_tile<E, entries, 1, true>
                                            : depthwise_gradient_tile<E, entries, 1, false>;
    run(call, source, row, batch, batch_end, channel, sums + channel);
  }
}

// Writes the sums of one entry.
template <typename E>
void depthwise_gradient_write(const ValueGradient& call, const typename E::Acc* sums, typename E::Storage* values) {
  using A = typename E::Arithmetic;
  const DepthwiseTiles<E> tiles(call.groups);
  for (int64_t tile = 0; tile < tiles.wide; ++tile) {
    const int64_t channel = tiles.channel(tile);
    typename A::Vec total[E::kVectors];
    LOCO_UNROLL for (int j = 0; j < E::kVectors; ++j) total[j] = A::load(sums + channel + j * A::kWidth);
    E::template write<E::kVectors, true>(values + channel, E::kVectors * A::kWidth, total);
  }
  const int64_t rest = tiles.channel(tiles.wide);
  store(call.dtype, sums + rest, values + rest, call.groups - rest);
}

// Entries begin to end, all of which find room for their sums.
template <typename E>
void depthwise_gradient_entries(const ValueGradient& call, int64_t begin, int64_t end, int64_t row,
                                typename E::Acc* sums) {
  const int64_t sums_row = depthwise_sums_row<E>(call);
  for (int64_t k = 0; k < (end - begin) * sums_row; ++k) sums[k] = 0;
  for (int64_t batch = 0; batch < call.batch; batch += kDepthwiseBatch) {
    const int64_t batch_end = least(batch + kDepthwiseBatch, call.batch);
    int64_t at = row;
    for (int64_t entry = begin; entry < end;) {
      while (call.first[at + 1] <= entry) ++at;
      const int64_t count = least(kRows, least(end, call.first[at + 1]) - entry);
      const auto run = count == kRows ? depthwise_gradient_channels<E, kRows> : depthwise_gradient_channels<E, 1>;
      run(call, call.source + entry, at, batch, batch_end, sums + (entry - begin) * sums_row);
      entry += count == kRows ? kRows : 1;
    }
  }
  auto* values = static_cast<typename E::Storage*>(call.values);
  for (int64_t entry = begin; entry < end; ++entry) {
    depthwise_gradient_write<E>(call, sums + (entry - begin) * sums_row, values + entry * call.groups);
  }
}

// Items are entries.
template <typename E>
void depthwise_gradient_range(const ValueGradient& call, int64_t begin, int64_t end) {
  const int64_t sums_row = depthwise_sums_row<E>(call);
  const int64_t most = sums_row < kDepthwiseSums ? kDepthwiseSums / sums_row : 1;
  const Memory<typename E::Acc> sums(most * sums_row);
  int64_t row = 0;
  for (int64_t entry = begin; entry < end; entry += most) {
    while (call.first[row + 1] <= entry) ++row;
    depthwise_gradient_entries<E>(call, entry, least(entry + most, end), row, &*sums);
  }
}

}  // namespace loco::block_sparse
