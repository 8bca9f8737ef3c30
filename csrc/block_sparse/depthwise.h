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

constexpr int64_t kDepthwiseBatch = 12;        // of value gradients
constexpr int64_t kDepthwiseSums = 16384;      // of value gradients that wait for the rest of the batch
constexpr int64_t kDepthwiseWindow = 1 << 19;  // bytes at most
constexpr int64_t kDepthwiseReads = 3;         // of a pixel, from which on a window pays
constexpr int64_t kDepthwiseAhead = 256;       // bytes of a pixel that are fetched together, so many pixels ahead
constexpr int64_t kDepthwisePixelsAhead = 16;

// Elements of a type, in vectors of an arithmetic; where not whole, only the first `count` of a vector are there.
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

  template <bool whole>
  static LOCO_INLINE Vec read(const Storage* at, int64_t count) {
    Storage some[A::kWidth] = {};
    if constexpr (!whole) {
      for (int64_t i = 0; i < count; ++i) some[i] = at[i];
      at = some;
    }
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

  template <bool whole>
  static LOCO_INLINE void write(Storage* at, int64_t count, Vec value) {
    if constexpr (whole && kPlain) {
      A::store(at, value);
    } else {
      Acc wide[A::kWidth];
      A::store(wide, value);
      if constexpr (whole) {
        narrow(wide, at);
      } else {
        store(type, wide, at, least(count, A::kWidth));
      }
    }
  }

  // By itself, for the compiler to see that it is a loop.
  __attribute__((noinline)) static void narrow(const Acc* from, Storage* to) {
    for (int i = 0; i < A::kWidth; ++i) to[i] = type == DType::f16 ? float_to_f16(from[i]) : float_to_bf16(from[i]);
  }
};

// What a row's sums start from.
template <typename E, bool whole>
LOCO_HD typename E::Vec depthwise_start(const Product& call, int64_t row, int64_t channel) {
  const typename E::Acc zeros[E::Arithmetic::kWidth] = {};
  const auto* bias = static_cast<const typename E::Storage*>(call.bias) + row * call.groups + channel;
  return call.bias ? E::template read<whole>(bias, call.groups - channel) : E::Arithmetic::load(zeros);
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

// What a tile reads: some samples and vectors of channels of some pixels, in the tensor or copied from there.
template <typename E>
struct Window {
  const typename E::Storage* data;  // of pixel 0, be it there or not
  int64_t pixel_stride, sample_stride;
  bool copied;  // whole vectors then, zeros behind the last channel
  int64_t batch, channel;
  bool first;  // of its channels
};

// The sums of one row, or of two side by side. A pixel that both rows read next is read once; each row takes its
// entries in their order.
template <typename E, int rows, int samples, int vectors, bool whole>
void depthwise_tile(const Product& call, const Window<E>& window, int64_t row) {
  using A = typename E::Arithmetic;
  using Storage = typename E::Storage;
  constexpr int kWidth = A::kWidth;
  const int64_t *const source = call.source, *const blocks = call.blocks, stride = call.groups;
  const int64_t count = stride - window.channel;
  const auto* const values = static_cast<const Storage*>(call.values) + window.channel;
  const auto* const pixels = window.data;
  typename A::Vec sums[rows][samples][vectors];
  int64_t entry[rows], end[rows];
  LOCO_UNROLL for (int r = 0; r < rows; ++r) {
    entry[r] = call.first[row + r], end[r] = call.first[row + r + 1];
    LOCO_UNROLL for (int j = 0; j < vectors; ++j) {
      const typename A::Vec start = depthwise_start<E, whole>(call, row + r, window.channel + j * kWidth);
      LOCO_UNROLL for (int i = 0; i < samples; ++i) sums[r][i][j] = start;
    }
  }
  // The next entry of the rows from `first` to before `last`, which read one pixel.
  const auto add = [&](auto first, auto last) LOCO_INLINE {
    constexpr int low = decltype(first)::value, high = decltype(last)::value;
    const auto* const pixel = pixels + source[entry[low]] * window.pixel_stride;
    const Storage* value[rows];
    LOCO_UNROLL for (int r = low; r < high; ++r) {
      value[r] = values + (blocks ? blocks[entry[r]] : entry[r]) * stride;
      ++entry[r];
    }
    LOCO_UNROLL for (int j = 0; j < vectors; ++j) {
      typename A::Vec v[rows];
      LOCO_UNROLL for (int r = low; r < high; ++r) v[r] = E::template read<whole>(value[r] + j * kWidth, count);
      LOCO_UNROLL for (int i = 0; i < samples; ++i) {
        const auto* const at = pixel + i * window.sample_stride + j * kWidth;
        const typename A::Vec x =
            whole || window.copied ? E::template read<true>(at, kWidth) : E::template read<false>(at, count);
        LOCO_UNROLL for (int r = low; r < high; ++r) sums[r][i][j] = A::multiply_add(x, v[r], sums[r][i][j]);
      }
    }
  };
  constexpr std::integral_constant<int, 0> kFirst{};
  constexpr std::integral_constant<int, 1> kSecond{};
  constexpr std::integral_constant<int, rows> kEnd{};
  if constexpr (rows == 2) {
    while (entry[0] < end[0] && entry[1] < end[1]) {
      const int64_t gap = source[entry[0]] - source[entry[1]];
      gap == 0 ? add(kFirst, kEnd) : gap < 0 ? add(kFirst, kSecond) : add(kSecond, kEnd);
    }
    while (entry[1] < end[1]) add(kSecond, kEnd);
  }
  while (entry[0] < end[0]) add(kFirst, kSecond);
  auto* to = static_cast<Storage*>(call.to.data) + window.batch * call.to.batch_stride + row * call.to.pixel_stride +
             window.channel;
  LOCO_UNROLL for (int r = 0; r < rows; ++r) {
    LOCO_UNROLL for (int i = 0; i < samples; ++i) {
      LOCO_UNROLL for (int j = 0; j < vectors; ++j) {
        E::template write<whole>(to + r * call.to.pixel_stride + i * call.to.batch_stride + j * kWidth, count,
                                 sums[r][i][j]);
      }
    }
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
  if (pixels.channel_stride != 1) {
    transpose<typename E::Square>(reinterpret_cast<const char*>(from), pixels.channel_stride * sizeof(Storage), count,
                                  length, to, to_row, width);
    return;
  }
  const int64_t place = channel * sizeof(Storage), rest = call.groups * sizeof(Storage) - place;
  const int64_t bytes = place % kDepthwiseAhead == 0 ? least(rest, kDepthwiseAhead) : 0;
  for (int64_t at = 0; at < length; ++at, from += pixels.pixel_stride, to += to_row) {
    std::memcpy(to, from, count * sizeof(Storage));
    if constexpr (!whole) std::memset(to + count, 0, (width - count) * sizeof(Storage));
    if (at + kDepthwisePixelsAhead >= length) continue;
    const auto* ahead = reinterpret_cast<const char*>(from + kDepthwisePixelsAhead * pixels.pixel_stride);
    for (int64_t k = 0; k < bytes; k += kLine) __builtin_prefetch(ahead + k, 0, 2);
  }
}

// Brings the values of a row and the next into cache.
template <typename E>
void depthwise_fetch(const Product& call, int64_t channel, int64_t row) {
  const auto* values = static_cast<const typename E::Storage*>(call.values) + channel;
  const int64_t end = call.first[least(row + 2, call.rows)];
  for (int64_t entry = call.first[least(row, call.rows)]; entry < end; ++entry) {
    __builtin_prefetch(values + (call.blocks ? call.blocks[entry] : entry) * call.groups, 0, 2);
  }
}

// Rows `row` to before `last`, which read the pixels of `span`; copied to `memory`, or from the tensor if that is null.
template <typename E, int vectors, bool whole, int samples = kRows>
void depthwise_rows(const Product& call, Window<E> window, Span span, typename E::Storage* memory, int64_t row,
                    int64_t last) {
  if constexpr (samples > 1) {
    if (call.batch - window.batch < samples) {
      return depthwise_rows<E, vectors, whole, samples - 1>(call, window, span, memory, row, last);
    }
  }
  constexpr int kChannels = vectors * E::Arithmetic::kWidth;
  if (memory) {
    window.pixel_stride = samples * kChannels, window.sample_stride = kChannels;
    window.data = memory - span.begin * window.pixel_stride;
    for (int64_t i = 0; i < samples; ++i) {
      depthwise_fill<E, kChannels, whole>(call, span, window.batch + i, window.channel, memory + i * kChannels,
                                          window.pixel_stride);
    }
  } else {
    window.pixel_stride = call.from.pixel_stride, window.sample_stride = call.from.batch_stride;
    window.data =
        static_cast<const typename E::Storage*>(call.from.data) + window.batch * window.sample_stride + window.channel;
  }
  for (; row + 2 <= last; row += 2) {
    if (window.first) depthwise_fetch<E>(call, window.channel, row + 4);
    depthwise_tile<E, 2, samples, vectors, whole>(call, window, row);
  }
  if (row < last) depthwise_tile<E, 1, samples, vectors, whole>(call, window, row);
}

// The pixels that each row reads, and what windows are to be made of them.
template <typename E>
class DepthwiseWindows {
  static constexpr int64_t kPixel = kRows * E::kVectors * E::Arithmetic::kWidth * sizeof(typename E::Storage);
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
  int64_t wide, count;

  explicit DepthwiseTiles(int64_t channels) : wide(channels / kWide), count(wide + pieces(channels % kWide, kWidth)) {}
  int64_t channel(int64_t tile) const { return tile < wide ? tile * kWide : wide * kWide + (tile - wide) * kWidth; }
};

template <typename E>
int64_t depthwise_items(const Product& call) {
  return call.rows * DepthwiseTiles<E>(call.groups).count * pieces(call.batch, kRows);
}

// Items are the rows of `to` for one tile of channels, then for the next, of one part of the batch, then of the next.
template <typename E>
void depthwise_range(const Product& call, int64_t begin, int64_t end) {
  const DepthwiseTiles<E> tiles(call.groups);
  const DepthwiseWindows<E> windows(call);
  const Memory<typename E::Storage> memory(windows.bytes() / sizeof(typename E::Storage));
  for (int64_t item = begin; item < end;) {
    const int64_t row = item % call.rows, part = item / call.rows, tile = part % tiles.count;
    const bool first = part - begin / call.rows < tiles.count;
    const Window<E> window{nullptr, 0, 0, windows.copied(), part / tiles.count * kRows, tiles.channel(tile), first};
    Span span{0, 0};  // where no row reads any
    const int64_t last = windows.end(row, row + end - item, span);
    const bool whole = window.channel + tiles.kWidth <= call.groups;
    const auto run = tile < tiles.wide ? depthwise_rows<E, E::kVectors, true>
                     : whole           ? depthwise_rows<E, 1, true>
                                       : depthwise_rows<E, 1, false>;
    run(call, window, span, windows.copied() ? &*memory : nullptr, row, last);
    item += last - row;
  }
}

// Of some entries of one row and a vector of channels, over a part of the batch.
template <typename E, int entries, bool whole>
void depthwise_gradient_tile(const ValueGradient& call, const int64_t* source, int64_t row, int64_t batch,
                             int64_t batch_end, int64_t channel, typename E::Acc* sums) {
  using A = typename E::Arithmetic;
  using Storage = typename E::Storage;
  const int64_t count = call.groups - channel, sums_row = pieces(call.groups, A::kWidth) * A::kWidth;
  typename A::Vec total[entries];
  LOCO_UNROLL for (int i = 0; i < entries; ++i) total[i] = A::load(sums + i * sums_row);
  for (int64_t n = batch; n < batch_end; ++n) {
    const auto* to =
        static_cast<const Storage*>(call.to.data) + n * call.to.batch_stride + row * call.to.pixel_stride + channel;
    const auto* from = static_cast<const Storage*>(call.from.data) + n * call.from.batch_stride + channel;
    const typename A::Vec right = E::template read<whole>(to, count);
    LOCO_UNROLL for (int i = 0; i < entries; ++i) {
      total[i] =
          A::multiply_add(E::template read<whole>(from + source[i] * call.from.pixel_stride, count), right, total[i]);
    }
  }
  LOCO_UNROLL for (int i = 0; i < entries; ++i) A::store(sums + i * sums_row, total[i]);
}

// The same of all channels.
template <typename E, int entries>
void depthwise_gradient_channels(const ValueGradient& call, const int64_t* source, int64_t row, int64_t batch,
                                 int64_t batch_end, typename E::Acc* sums) {
  constexpr int64_t kWidth = E::Arithmetic::kWidth;
  int64_t channel = 0;
  for (; channel + kWidth <= call.groups; channel += kWidth) {
    depthwise_gradient_tile<E, entries, true>(call, source, row, batch, batch_end, channel, sums + channel);
  }
  if (channel == call.groups) return;
  depthwise_gradient_tile<E, entries, false>(call, source, row, batch, batch_end, channel, sums + channel);
}

// Entries begin to end, all of which find room for their sums.
template <typename E>
void depthwise_gradient_entries(const ValueGradient& call, int64_t begin, int64_t end, int64_t row,
                                typename E::Acc* sums) {
  using A = typename E::Arithmetic;
  const int64_t sums_row = pieces(call.groups, A::kWidth) * A::kWidth;
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
    store(call.dtype, sums + (entry - begin) * sums_row, values + entry * call.groups, call.groups);
  }
}

// Items are entries.
template <typename E>
void depthwise_gradient_range(const ValueGradient& call, int64_t begin, int64_t end) {
  const int64_t sums_row = pieces(call.groups, E::Arithmetic::kWidth) * E::Arithmetic::kWidth;
  const int64_t most = sums_row < kDepthwiseSums ? kDepthwiseSums / sums_row : 1;
  const Memory<typename E::Acc> sums(most * sums_row);
  int64_t row = 0;
  for (int64_t entry = begin; entry < end; entry += most) {
    while (call.first[row + 1] <= entry) ++row;
    depthwise_gradient_entries<E>(call, entry, least(entry + most, end), row, &*sums);
  }
}

}  // namespace loco::block_sparse
