// Value gradients of blocks of one element (see depthwise.cpp).
//
//   values[e, c] = sum over n of from[n, source[e], c] to[n, row of e, c]
//
// from is [batch, pixels, channels] and to [batch, rows, channels], with the strides of Pixels (cpu.h) and contiguous
// channels; values is contiguous [entries, channels].
//
// An item is an entry. A thread takes its entries in groups whose sums fit into scratch memory, and for each group the
// batch in small parts: in the tensor, pixels are so far apart that the L1 cache would not keep those of more samples
// until the next row.
#include "block_sparse/depthwise.h"

namespace loco::block_sparse {
LOCO_KERNELS_BEGIN

constexpr int64_t kDepthwiseBatch = 12;    // samples in a part of the batch
constexpr int64_t kDepthwiseSums = 16384;  // sums that wait for the rest of the batch, at most

// Return the number of sums of an entry, in whole vectors.
template <typename E>
int64_t depthwise_sums_row(const ValueGradient& call) {
  return pieces(call.groups, E::Arithmetic::kWidth) * E::Arithmetic::kWidth;
}

// Add the gradients of some entries of one row and some vectors of channels over a part of the batch.
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

// Add the gradients of some entries of one row over a part of the batch, for all channels.
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

// Write the sums of one entry to `values`.
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

// Compute entries begin .. end - 1, whose sums all fit into `sums`.
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

// Compute items begin .. end - 1; an item is an entry.
template <typename E>
void depthwise_gradient_range(const ValueGradient& call, int64_t begin, int64_t end) {
  const int64_t sums_row = depthwise_sums_row<E>(call);
  const int64_t most = sums_row < kDepthwiseSums ? kDepthwiseSums / sums_row : 1;
  const AlignedBuffer<typename E::Acc> sums(most * sums_row);
  int64_t row = 0;
  for (int64_t entry = begin; entry < end; entry += most) {
    while (call.first[row + 1] <= entry) ++row;
    depthwise_gradient_entries<E>(call, entry, least(entry + most, end), row, sums.data());
  }
}

const GradientKernels depthwise_value_gradients{{depthwise_gradient_range<F64>, depthwise_gradient_range<F32>,
                                                 depthwise_gradient_range<Bf16>, depthwise_gradient_range<F16>}};

LOCO_KERNELS_END
}  // namespace loco::block_sparse
