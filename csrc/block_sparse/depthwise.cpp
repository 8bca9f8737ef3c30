// Products with blocks of one element, as in a depthwise convolution: every channel has a sparse matrix of its own.
//
//   to[n, r, c] = bias[r, c] + sum over entries e of row r of from[n, source[e], c] values[blocks ? blocks[e] : e, c]
//
// from is [batch, pixels, channels], to [batch, rows, channels], both with the strides of Pixels (cpu.h); values
// [entries, channels] and bias [rows, channels] are contiguous. Vectors lie along the channels, and elements are
// converted as they are read.
//
// An item is one row for one vector of channels and one part of the batch of at most kSamples samples, whose sums stay
// in registers. A thread takes a range of items, in which rows follow each other.
//
// If rows read the same pixels, a thread first copies the pixels of its few samples and its vector of channels into a
// ring buffer: in the tensor, pixels are so far apart, and often at such even distances, that the L1 cache would not
// keep them until the next row. Each row copies the pixels that the row before it did not have and prefetches those of
// later rows, so that memory is read all the time.
#include "block_sparse/depthwise.h"

#include <cstring>

#include "block_sparse/kernels.h"

namespace loco::block_sparse {
LOCO_KERNELS_BEGIN

constexpr int kSamples = 12;                              // samples whose sums stay in registers
constexpr int64_t kRing = 1 << 20;                        // bytes of a ring, at most
constexpr int64_t kReads = 3;                             // reads per pixel from which on a ring pays
constexpr int64_t kTransposedAtOnce = 16;                 // pixels copied at once where pixels have stride 1
constexpr int64_t kPixelsAhead = 16, kEntriesAhead = 96;  // distances of prefetches

// Load the initial value of a row's sums: its bias, or zeros.
template <typename E, bool whole>
LOCO_HD typename E::Vec start_of(const Product& call, int64_t row, int64_t channel) {
  if (!call.bias) return typename E::Vec{};
  const auto* bias = static_cast<const typename E::Storage*>(call.bias) + row * call.groups + channel;
  return E::template read<whole>(bias, call.groups - channel);
}

// The pixels in [begin, end), or none.
struct Span {
  int64_t begin = INT64_MAX, end = 0;

  LOCO_HD int64_t length() const { return end > begin ? end - begin : 0; }
  LOCO_HD void join(Span other) {
    begin = least(begin, other.begin);
    end = most(end, other.end);
  }
};

// Return the distance between pixels in a ring, in vectors of channels. It is odd so that pixels below each other are
// in different cache sets.
constexpr int64_t ring_stride(int64_t samples) { return samples | 1; }

// The pixels that each row reads, and the size of the rings, if any are used.
template <typename E>
class Spans {
  static constexpr int64_t kPixel = ring_stride(kSamples) * E::kWidth * sizeof(typename E::Storage);

 public:
  explicit Spans(const Product& call) : call_(call), unit_(call.from.channel_stride == 1 ? 1 : kTransposedAtOnce) {
    int64_t widest = 0;
    bool ordered = true;
    for (int64_t row = 0; row < call.rows; ++row) {
      const Span span = of(row);
      all_.join(span);
      widest = most(widest, span.length());
      for (int64_t entry = call.first[row] + 1; entry < call.first[row + 1]; ++entry) {
        ordered &= call.source[entry - 1] <= call.source[entry];
      }
    }
    ordered_ = ordered;
    const bool pays = widest * kPixel <= kRing && call.first[call.rows] >= kReads * all_.length();
    // If pixels have stride 1, they have to be copied.
    if (pays || unit_ > 1) size_ = pieces(widest + unit_ - 1, unit_) * unit_;
  }

  Span of(int64_t row) const {
    const int64_t begin = call_.first[row], end = call_.first[row + 1];
    if (begin == end) return {};
    if (ordered_) return {call_.source[begin], call_.source[end - 1] + 1};
    Span span;
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
  Span all_;
  bool ordered_ = false;  // whether the entries of each row ascend
  int64_t size_ = 0;
};

// Some samples and one vector of channels: of all pixels, in the tensor, or of the pixels in a ring of `size` pixels,
// [pixel % size, sample, channel], with zeros beyond the last channel.
template <typename E>
struct Window {
  typename E::Storage* data;
  int64_t batch, samples, channel, size;
};

// Compute one row of `to`, which reads pixels from `lowest` on, for `samples` samples from sample `first` of the window
// on.
template <typename E, int samples, bool whole, bool copied>
void row_tile(const Product& call, const Window<E>& window, int64_t first, int64_t row, int64_t lowest) {
  using A = typename E::Arithmetic;
  using Storage = typename E::Storage;
  constexpr bool kWholePixels = whole || copied;
  const int64_t count = call.groups - window.channel;
  const auto* const values = static_cast<const Storage*>(call.values) + window.channel;
  const int64_t sample_stride = copied ? E::kWidth : call.from.batch_stride;
  const int64_t pixel_stride = copied ? ring_stride(window.samples) * E::kWidth : call.from.pixel_stride;
  const int64_t start = copied ? lowest / window.size * window.size : 0, size = window.size;
  typename E::Vec sums[samples];
  const typename E::Vec bias = start_of<E, whole>(call, row, window.channel);
  LOCO_UNROLL for (int i = 0; i < samples; ++i) sums[i] = bias;
  const int64_t end = call.first[row + 1], entries = call.first[call.rows];
  for (int64_t entry = call.first[row]; entry < end; ++entry) {
    int64_t place = call.source[entry] - start;
    if constexpr (copied) place = place < size ? place : place - size;
    const auto* const pixel = window.data + place * pixel_stride + first * sample_stride;
    const int64_t next = least(entry + kEntriesAhead, entries - 1);
    const auto* const value = values + (call.blocks ? call.blocks[entry] : entry) * call.groups;
    __builtin_prefetch(values + (call.blocks ? call.blocks[next] : next) * call.groups, 0, 2);
    const typename E::Vec v = E::template read<whole>(value, count);
    LOCO_UNROLL for (int i = 0; i < samples; ++i) {
      const typename E::Vec x = E::template read<kWholePixels>(pixel + i * sample_stride, count);
      sums[i] = A::multiply_add(x, v, sums[i]);
    }
  }
  auto* to = static_cast<Storage*>(call.to.data) + (window.batch + first) * call.to.batch_stride +
             row * call.to.pixel_stride + window.channel;
  LOCO_UNROLL for (int i = 0; i < samples; ++i) {
    E::template write<whole>(to + i * call.to.batch_stride, count, sums[i]);
  }
}

// Copy one pixel of all samples of a window to `to`, [sample, channel]. Channels have stride 1.
template <typename E>
void copy_pixel(const Product& call, const Window<E>& window, int64_t pixel, int64_t last, typename E::Storage* to) {
  using Storage = typename E::Storage;
  const int64_t count = least(E::kWidth, call.groups - window.channel), stride = call.from.batch_stride;
  const auto* const from = static_cast<const Storage*>(call.from.data) + window.batch * stride + window.channel;
  const auto* const here = from + pixel * call.from.pixel_stride;
  const auto* const ahead = from + least(pixel + kPixelsAhead, last) * call.from.pixel_stride;
  for (int64_t i = 0; i < window.samples; ++i, to += E::kWidth) {
    __builtin_prefetch(ahead + i * stride, 0, 2);
    if (count == E::kWidth) {
      std::memcpy(to, here + i * stride, E::kWidth * sizeof(Storage));
    } else {
      std::memcpy(to, here + i * stride, count * sizeof(Storage));
      std::memset(to + count, 0, (E::kWidth - count) * sizeof(Storage));
    }
  }
}

// Copy `length` pixels of all samples of a window to `to`, [pixel, sample, channel]. Pixels have stride 1.
template <typename E>
void copy_transposed(const Product& call, const Window<E>& window, int64_t pixel, int64_t length,
                     typename E::Storage* to) {
  using Storage = typename E::Storage;
  const int64_t pixel_stride = ring_stride(window.samples) * E::kWidth, stride = call.from.channel_stride;
  const int64_t count = least(E::kWidth, call.groups - window.channel);
  const auto* from = static_cast<const Storage*>(call.from.data) + window.batch * call.from.batch_stride +
                     window.channel * stride + pixel;
  for (int64_t i = 0; i < window.samples; ++i, from += call.from.batch_stride, to += E::kWidth) {
    for (int64_t c = 0; c < count; ++c) __builtin_prefetch(from + c * stride + length, 0, 2);
    transpose<typename E::Square>(reinterpret_cast<const char*>(from), stride * sizeof(Storage), count, length, to,
                                  pixel_stride);
    for (int64_t at = 0; at < length; ++at) {
      std::memset(to + at * pixel_stride + count, 0, (E::kWidth - count) * sizeof(Storage));
    }
  }
}

// Copy the pixels of `span` that are missing in a ring, which has those of `cached`.
template <typename E>
void fill_ring(const Product& call, const Spans<E>& spans, const Window<E>& window, Span span, Span& cached) {
  const int64_t unit = spans.unit(), pixel_stride = ring_stride(window.samples) * E::kWidth;
  // The first pixel that leaves room for the last: later rows may read further back than this one.
  const int64_t first = pieces(most(span.end - window.size, 0), unit) * unit;
  if (span.begin < cached.begin || first > cached.end) cached = {first, first};
  while (cached.end < span.end) {
    auto* const to = window.data + cached.end % window.size * pixel_stride;
    if (unit == 1) {
      copy_pixel(call, window, cached.end, spans.end() - 1, to);
    } else {
      copy_transposed(call, window, cached.end, least(unit, spans.end() - cached.end), to);
    }
    cached.end += unit;
    cached.begin = most(cached.begin, cached.end - window.size);
  }
}

// Compute a row for the samples of a window from `first` on, in tiles of kSamples, 8, 4, 2 or 1 samples.
template <typename E, bool whole, bool copied, int samples = kSamples>
void row_tiles(const Product& call, const Window<E>& window, int64_t first, int64_t row, int64_t lowest) {
  for (; first + samples <= window.samples; first += samples) {
    row_tile<E, samples, whole, copied>(call, window, first, row, lowest);
  }
  if constexpr (samples > 1) {
    constexpr int fewer = samples > 8 ? 8 : samples / 2;
    row_tiles<E, whole, copied, fewer>(call, window, first, row, lowest);
  }
}

// Compute rows `row` to before `last`, from a ring or from the tensor.
template <typename E, bool whole, bool copied>
void window_rows(const Product& call, const Spans<E>& spans, const Window<E>& window, int64_t row, int64_t last) {
  constexpr int most_samples = whole ? kSamples : 4;  // few channels are in a vector that is not whole
  Span cached{0, 0};
  for (; row < last; ++row) {
    const Span span = spans.of(row);
    if (copied && span.length() > 0) fill_ring(call, spans, window, span, cached);
    row_tiles<E, whole, copied, most_samples>(call, window, 0, row, span.begin);
  }
}

template <typename E>
int64_t depthwise_items(const Product& call) {
  return call.rows * pieces(call.groups, E::kWidth) * pieces(call.batch, kSamples);
}

// Compute items begin .. end - 1. Items are ordered by part of the batch, then vector of channels, then row of `to`.
template <typename E>
void depthwise_range(const Product& call, int64_t begin, int64_t end) {
  const Spans<E> spans(call);
  const int64_t vectors = pieces(call.groups, E::kWidth);
  const Memory<typename E::Storage> memory(spans.bytes() / sizeof(typename E::Storage));
  for (int64_t item = begin; item < end;) {
    const int64_t row = item % call.rows, part = item / call.rows;
    const int64_t batch = part / vectors * kSamples, channel = part % vectors * E::kWidth;
    Window<E> window{memory.data(), batch, least(kSamples, call.batch - batch), channel, spans.size()};
    if (spans.size() == 0) {
      window.data = static_cast<typename E::Storage*>(call.from.data) + batch * call.from.batch_stride + channel;
    }
    const int64_t last = least(call.rows, row + end - item);
    const bool whole = channel + E::kWidth <= call.groups;
    const auto rows = spans.size() > 0 ? (whole ? window_rows<E, true, true> : window_rows<E, false, true>)
                                       : (whole ? window_rows<E, true, false> : window_rows<E, false, false>);
    rows(call, spans, window, row, last);
    item += last - row;
  }
}

const ProductKernels depthwise_products{{{depthwise_items<F64>, depthwise_range<F64>},
                                         {depthwise_items<F32>, depthwise_range<F32>},
                                         {depthwise_items<Bf16>, depthwise_range<Bf16>},
                                         {depthwise_items<F16>, depthwise_range<F16>}}};

LOCO_KERNELS_END
}  // namespace loco::block_sparse
