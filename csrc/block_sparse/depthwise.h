// Blocks of one element: every channel has a matrix of its own, as in a depthwise convolution, and vectors lie along
// the channels. Elements are converted as they are read.
//
// The batch goes in small parts, one after the other over all rows, so that the pixels that neighbouring rows share
// stay in cache.
#pragma once

#include <type_traits>

#include "block_sparse/panels.h"

namespace loco::block_sparse {

constexpr int64_t kDepthwiseBatch = 12;
constexpr int64_t kDepthwiseSums = 16384;  // of value gradients that wait for the rest of the batch
constexpr int kDepthwiseVectors = 2;

// Elements of a type, in vectors of an arithmetic; where not whole, only the first `count` of a vector are there.
template <typename A, DType type>
struct Elements {
  using Arithmetic = A;
  using Vec = typename A::Vec;
  using Acc = typename A::Acc;
  using Storage = std::conditional_t<type == DType::bf16 || type == DType::f16, uint16_t, Acc>;
  static constexpr bool kPlain = std::is_same_v<Storage, Acc>;

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

  static LOCO_INLINE void write(Storage* at, int64_t count, Vec value) {
    Acc wide[A::kWidth];
    A::store(wide, value);
    store(type, wide, at, least(count, A::kWidth));
  }
};

// The sums of one row for some samples and vectors of channels.
template <typename E, int samples, int vectors, bool whole>
void depthwise_tile(const Product& call, int64_t row, int64_t batch, int64_t channel) {
  using A = typename E::Arithmetic;
  using Storage = typename E::Storage;
  const int64_t count = call.groups - channel;
  const auto* from = static_cast<const Storage*>(call.from.data) + batch * call.from.batch_stride + channel;
  const auto* values = static_cast<const Storage*>(call.values) + channel;
  typename E::Acc zeros[A::kWidth] = {};
  typename A::Vec sums[samples][vectors];
  LOCO_UNROLL for (int j = 0; j < vectors; ++j) {
    const auto* bias = static_cast<const Storage*>(call.bias) + row * call.groups + channel + j * A::kWidth;
    const typename A::Vec start = call.bias ? E::template read<whole>(bias, count - j * A::kWidth) : A::load(zeros);
    LOCO_UNROLL for (int i = 0; i < samples; ++i) sums[i][j] = start;
  }
  for (int64_t e = call.first[row]; e < call.first[row + 1]; ++e) {
    const Storage* pixel = from + call.source[e] * call.from.pixel_stride;
    const Storage* value = values + (call.blocks ? call.blocks[e] : e) * call.groups;
    LOCO_UNROLL for (int j = 0; j < vectors; ++j) {
      const int64_t at = j * A::kWidth;
      const typename A::Vec v = E::template read<whole>(value + at, count - at);
      LOCO_UNROLL for (int i = 0; i < samples; ++i) {
        sums[i][j] = A::multiply_add(E::template read<whole>(pixel + i * call.from.batch_stride + at, count - at), v,
                                     sums[i][j]);
      }
    }
  }
  auto* to = static_cast<Storage*>(call.to.data) + batch * call.to.batch_stride + row * call.to.pixel_stride + channel;
  LOCO_UNROLL for (int i = 0; i < samples; ++i) {
    LOCO_UNROLL for (int j = 0; j < vectors; ++j) {
      E::write(to + i * call.to.batch_stride + j * A::kWidth, count - j * A::kWidth, sums[i][j]);
    }
  }
}

// All channels of one row, for some samples.
template <typename E, int samples>
void depthwise_samples(const Product& call, int64_t row, int64_t batch) {
  constexpr int64_t kWidth = E::Arithmetic::kWidth, kWhole = kWidth * kDepthwiseVectors;
  int64_t channel = 0;
  for (; channel + kWhole <= call.groups; channel += kWhole) {
    depthwise_tile<E, samples, kDepthwiseVectors, true>(call, row, batch, channel);
  }
  for (; channel + kWidth <= call.groups; channel += kWidth) {
    depthwise_tile<E, samples, 1, true>(call, row, batch, channel);
  }
  if (channel < call.groups) depthwise_tile<E, samples, 1, false>(call, row, batch, channel);
}

template <typename E>
int64_t depthwise_items(const Product& call) {
  return call.rows * pieces(call.batch, kDepthwiseBatch);
}

// Items are the rows of `to` for one part of the batch, then for the next.
template <typename E>
void depthwise_range(const Product& call, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item % call.rows;
    int64_t batch = item / call.rows * kDepthwiseBatch;
    const int64_t last = least(batch + kDepthwiseBatch, call.batch);
    for (; batch + kRows <= last; batch += kRows) depthwise_samples<E, kRows>(call, row, batch);
    for (; batch < last; ++batch) depthwise_samples<E, 1>(call, row, batch);
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
