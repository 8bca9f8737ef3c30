// Products with blocks of one element, as in a depthwise convolution: every channel has a sparse matrix of its own.
//
//   to[n, r, c] = bias[r, c] + sum over entries e of row r of from[n, source[e], c] values[blocks ? blocks[e] : e, c]
//
// from is [batch, pixels, channels], to [batch, rows, channels], both with the strides of Pixels (cpu.h); values
// [entries, channels] and bias [rows, channels] are contiguous. Vectors lie along the channels, and elements are
// converted as they are read.
//
// An item is one row for one tile of channels and one part of the batch of at most kDepthwiseSamples samples, whose
// sums stay in registers. A thread takes a range of items, in which rows follow each other.
//
// If rows read the same pixels, a thread first copies the pixels of its few samples and its vector of channels into a
// ring buffer: in the tensor, pixels are so far apart, and often at such even distances, that the L1 cache would not
// keep them until the next row. Each row copies the pixels that the row before it did not have and prefetches those of
// later rows, so that memory is read all the time.
#include "block_sparse/depthwise.h"

#include <cstring>

namespace loco::block_sparse {
LOCO_KERNELS_BEGIN

constexpr int kDepthwiseSamples = 11;  // samples whose sums stay in registers
static_assert(kDepthwiseSamples % 2 == 1, "pixels of a ring that are below each other are in different cache sets");
constexpr int64_t kDepthwiseRing = 1 << 20;   // bytes of a ring, at most
constexpr int64_t kDepthwiseReads = 3;        // reads per pixel from which on a ring pays
constexpr int64_t kDepthwiseTransposed = 16;  // pixels copied at once where pixels have stride 1
// Prefetch distances.
constexpr int64_t kDepthwisePixelsAhead = 16, kDepthwiseEntriesAhead = 96;

// Load the initial values of a row's sums: its bias, or zeros.
template <typename E, int vectors, bool whole>
LOCO_HD void depthwise_start(const Product& call, int64_t row, int64_t channel, typename E::Vec (&to)[vectors]) {
  const typename E::Acc zeros[E::Arithmetic::kWidth] = {};
  LOCO_UNROLL for (int j = 0; j < vectors; ++j) to[j] = E::Arithmetic::load(zeros);
  if (!call.bias) return;
  const auto* bias = static_cast<const typename E::Storage*>(call.bias) + row * call.groups + channel;
  E::template read<vectors, whole>(bias, call.groups - channel, to);
}

// The pixels in [begin, end), or none.
struct PixelRange {
  int64_t begin = INT64_MAX, end = 0;

  LOCO_HD int64_t length() const { return end > begin ? end - begin : 0; }
  LOCO_HD void join(PixelRange other) {
    begin = least(begin, other.begin);
    end = most(end, other.end);
  }
};

// The pixels that each row reads, and the size of the rings, if any are used.
template <typename E>
class DepthwiseSpans {
  static constexpr int64_t kPixel =
      kDepthwiseSamples * E::kVectors * E::Arithmetic::kWidth * sizeof(typename E::Storage);

 public:
  explicit DepthwiseSpans(const Product& call)
      : call_(call), unit_(call.from.channel_stride == 1 ? 1 : kDepthwiseTransposed) {
    int64_t widest = 0;
    bool ordered = true;
    for (int64_t row = 0; row < call.rows; ++row) {
      const PixelRange span = of(row);
      all_.join(span);
      widest = most(widest, span.length());
      for (int64_t entry = call.first[row] + 1; entry < call.first[row + 1]; ++entry) {
        ordered &= call.source[entry - 1] <= call.source[entry];
      }
    }
    ordered_ = ordered;
    const bool pays = widest * kPixel <= kDepthwiseRing && call.first[call.rows] >= kDepthwiseReads * all_.length();
    // If pixels have stride 1, they have to be copied.
    if (pays || unit_ > 1) size_ = pieces(widest + unit_ - 1, unit_) * unit_;
  }

  PixelRange of(int64_t row) const {
    const int64_t begin = call_.first[row], end = call_.first[row + 1];
    if (begin == end) return {};
    if (ordered_) return {call_.source[begin], call_.source[end - 1] + 1};
    PixelRange span;
    for (int64_t entry = begin; entry < end; ++entry) span.join({call_.source[entry], call_.source[entry] + 1});
    return span;
  }
  // Return the end of the pixels that any row reads.
  int64_t end() const { return all_.end; }
  // Return the number of pixels that are copied at once, which begin at a multiple of it.
  int64_t unit() const { return unit_; }
  // Return the number of pixels in a ring, a multiple of the unit, or 0 if tiles read the tensor directly.
  int64_t size() const { return size_; }
  int64_t bytes() const { return size_ * kPixel; }

 private:
  const Product& call_;
  const int64_t unit_;
  PixelRange all_;
  bool ordered_ = false;  // whether the entries of each row ascend
  int64_t size_ = 0;
};

// Some samples and vectors of channels: of all pixels, in the tensor, or of the pixels in a ring of `size` pixels,
// [pixel % size, sample, channel], with room for kDepthwiseSamples samples and zeros beyond the last channel.
template <typename E>
struct Window {
  typename E::Storage* data;
  int64_t batch, samples, channel, size;
};

// Compute one row, which reads pixels from `lowest` on.
template <typename E, int samples, int vectors, bool whole, bool copied>
void depthwise_tile(const Product& call, const Window<E>& window, int64_t row, int64_t lowest) {
  using A = typename E::Arithmetic;
  using Storage = typename E::Storage;
  constexpr int kWidth = A::kWidth;
  const int64_t count = call.groups - window.channel;
  const auto* const values = static_cast<const Storage*>(call.values) + window.channel;
  const int64_t sample_stride = copied ? vectors * kWidth : call.from.batch_stride;
  const int64_t pixel_stride = copied ? kDepthwiseSamples * sample_stride : call.from.pixel_stride;
  const int64_t start = copied ? lowest / window.size * window.size : 0, size = window.size;
  typename A::Vec sums[samples][vectors], x[vectors], v[vectors];
  depthwise_start<E, vectors, whole>(call, row, window.channel, v);
  LOCO_UNROLL for (int i = 0; i < samples; ++i) { LOCO_UNROLL for (int j = 0; j < vectors; ++j) sums[i][j] = v[j]; }
  const int64_t end = call.first[row + 1], entries = call.first[call.rows];
  for (int64_t entry = call.first[row]; entry < end; ++entry) {
    int64_t place = call.source[entry] - start;
    if constexpr (copied) place = place < size ? place : place - size;
    const auto* const pixel = window.data + place * pixel_stride;
    const int64_t next = least(entry + kDepthwiseEntriesAhead, entries - 1);
    const auto* const value = values + (call.blocks ? call.blocks[entry] : entry) * call.groups;
    __builtin_prefetch(values + (call.blocks ? call.blocks[next] : next) * call.groups, 0, 2);
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

// Copy the samples of a pixel whose channels have stride 1.
template <typename E, int channels, bool whole>
void depthwise_copy(const Product& call, const Window<E>& window, int64_t pixel, int64_t last,
                    typename E::Storage* to) {
  using Storage = typename E::Storage;
  const int64_t samples = window.samples, stride = call.from.batch_stride;
  const int64_t count = whole ? channels : call.groups - window.channel;
  const auto* const from = static_cast<const Storage*>(call.from.data) + window.batch * stride + window.channel;
  const auto* const here = from + pixel * call.from.pixel_stride;
  const auto* const ahead = from + least(pixel + kDepthwisePixelsAhead, last) * call.from.pixel_stride;
  for (int64_t i = 0; i < samples; ++i) {
    std::memcpy(to + i * channels, here + i * stride, count * sizeof(Storage));
    if constexpr (!whole) std::memset(to + i * channels + count, 0, (channels - count) * sizeof(Storage));
    __builtin_prefetch(ahead + i * stride, 0, 2);
  }
}

// Copy the samples of `length` pixels, transposed: pixels have stride 1.
template <typename E, int channels, bool whole>
void depthwise_transpose(const Product& call, const Window<E>& window, int64_t pixel, int64_t length,
                         typename E::Storage* to) {
  using Storage = typename E::Storage;
  constexpr int64_t kPixel = kDepthwiseSamples * channels;
  const int64_t count = whole ? channels : call.groups - window.channel, stride = call.from.channel_stride;
  const auto* from = static_cast<const Storage*>(call.from.data) + window.batch * call.from.batch_stride +
                     window.channel * stride + pixel;
  for (int64_t i = 0; i < window.samples; ++i, from += call.from.batch_stride, to += channels) {
    for (int64_t c = 0; c < count; ++c) __builtin_prefetch(from + c * stride + length, 0, 2);
    transpose<typename E::Square>(reinterpret_cast<const char*>(from), stride * sizeof(Storage), count, length, to,
                                  kPixel);
    if constexpr (whole) continue;
    for (int64_t at = 0; at < length; ++at) {
      std::memset(to + at * kPixel + count, 0, (channels - count) * sizeof(Storage));
    }
  }
}

// Copy the pixels of `span` that are missing in a ring, which has those of `cached`.
template <typename E, int vectors, bool whole>
void depthwise_fill(const Product& call, const DepthwiseSpans<E>& spans, const Window<E>& window, PixelRange span,
                    PixelRange& cached) {
  constexpr int kChannels = vectors * E::Arithmetic::kWidth;
  const int64_t unit = spans.unit();
  // The first pixel that leaves room for the last: later rows may read further back than this one.
  const int64_t first = pieces(most(span.end - window.size, 0), unit) * unit;
  if (span.begin < cached.begin || first > cached.end) cached = {first, first};
  while (cached.end < span.end) {
    auto* const to = window.data + cached.end % window.size * kDepthwiseSamples * kChannels;
    if (unit == 1) {
      depthwise_copy<E, kChannels, whole>(call, window, cached.end, spans.end() - 1, to);
    } else {
      const int64_t length = least(unit, spans.end() - cached.end);
      depthwise_transpose<E, kChannels, whole>(call, window, cached.end, length, to);
    }
    cached.end += unit;
    cached.begin = most(cached.begin, cached.end - window.size);
  }
}

template <typename E>
using DepthwiseTile = void (*)(const Product& call, const Window<E>& window, int64_t row, int64_t lowest);

// Return the tile for the largest number of samples, at most `most`, that has one, and write that number. Every number
// has a tile for whole vectors of float32 and half precision, in which most channels are. Elsewhere some numbers have
// none, as each takes long to compile.
template <typename E, int vectors, bool whole, bool copied, int count = kDepthwiseSamples>
DepthwiseTile<E> depthwise_tile_of(int64_t most, int64_t& samples) {
  constexpr bool kMostChannels = whole && vectors == E::kVectors && !std::is_same_v<E, F64>;
  constexpr int kFewer = kMostChannels || count == kDepthwiseSamples || count <= 2 ? count - 1 : count - 2;
  if constexpr (kFewer > 0) {
    if (most < count) return depthwise_tile_of<E, vectors, whole, copied, kFewer>(most, samples);
  }
  samples = count;
  return depthwise_tile<E, count, vectors, whole, copied>;
}

// Compute rows `row` to before `last`, from a ring or from the tensor.
template <typename E, int vectors, bool whole, bool copied>
void depthwise_rows(const Product& call, const DepthwiseSpans<E>& spans, Window<E> window, int64_t row, int64_t last) {
  for (int64_t left = window.samples; left > 0; left -= window.samples) {
    const auto tile = depthwise_tile_of<E, vectors, whole, copied>(left, window.samples);
    PixelRange cached{0, 0};
    for (int64_t at = row; at < last; ++at) {
      const PixelRange span = spans.of(at);
      if (copied && span.length() > 0) {
        depthwise_fill<E, vectors, whole>(call, spans, window, span, cached);
      }
      tile(call, window, at, span.begin);
    }
    window.batch += window.samples;
    if (!copied) window.data += window.samples * call.from.batch_stride;
  }
}

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

// Compute items begin .. end - 1. Items are ordered by part of the batch, then tile of channels, then row of `to`.
template <typename E>
void depthwise_range(const Product& call, int64_t begin, int64_t end) {
  const DepthwiseTiles<E> tiles(call.groups);
  const DepthwiseSpans<E> spans(call);
  const int64_t parts = pieces(call.batch, kDepthwiseSamples);
  const AlignedBuffer<typename E::Storage> memory(spans.bytes() / sizeof(typename E::Storage));
  for (int64_t item = begin; item < end;) {
    const int64_t row = item % call.rows, part = item / call.rows, tile = part % tiles.count;
    const int64_t batch = part / tiles.count * call.batch / parts, next = (part / tiles.count + 1) * call.batch / parts;
    Window<E> window{memory.data(), batch, next - batch, tiles.channel(tile), spans.size()};
    if (spans.size() == 0) {
      window.data = static_cast<typename E::Storage*>(call.from.data) + batch * call.from.batch_stride + window.channel;
    }
    const int64_t last = least(call.rows, row + end - item);
    const auto rows = spans.size() > 0 ? depthwise_rows_of<E, true> : depthwise_rows_of<E, false>;
    rows(tile < tiles.wide, tiles.whole(window.channel))(call, spans, window, row, last);
    item += last - row;
  }
}

const ProductKernels depthwise_products{{{depthwise_items<F64>, depthwise_range<F64>},
                                         {depthwise_items<F32>, depthwise_range<F32>},
                                         {depthwise_items<Bf16>, depthwise_range<Bf16>},
                                         {depthwise_items<F16>, depthwise_range<F16>}}};

LOCO_KERNELS_END
}  // namespace loco::block_sparse
