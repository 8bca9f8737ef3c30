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
#include "block_sparse/kernels.h"

namespace loco::block_sparse {
LOCO_KERNELS_BEGIN

constexpr int64_t kBatch = 12;    // samples in a part of the batch
constexpr int64_t kSums = 16384;  // sums that wait for the rest of the batch, at most

// Return the number of sums of an entry, in whole vectors.
template <typename E>
int64_t sums_row(const ValueGradient& call) {
  return pieces(call.groups, E::kWidth) * E::kWidth;
}

// Add the gradients of some entries of one row over a part of the batch, for one vector of channels.
template <typename E, int entries, bool whole>
void gradient_tile(const ValueGradient& call, const int64_t* source, int64_t row, int64_t batch, int64_t batch_end,
                   int64_t channel, typename E::Acc* sums) {
  using A = typename E::Arithmetic;
  using Storage = typename E::Storage;
  const int64_t count = call.groups - channel, stride = sums_row<E>(call);
  typename E::Vec total[entries];
  LOCO_UNROLL for (int i = 0; i < entries; ++i) total[i] = A::load(sums + i * stride);
  for (int64_t n = batch; n < batch_end; ++n) {
    const auto* to =
        static_cast<const Storage*>(call.to.data) + n * call.to.batch_stride + row * call.to.pixel_stride + channel;
    const auto* from = static_cast<const Storage*>(call.from.data) + n * call.from.batch_stride + channel;
    const typename E::Vec right = E::template read<whole>(to, count);
    LOCO_UNROLL for (int i = 0; i < entries; ++i) {
      const typename E::Vec left = E::template read<whole>(from + source[i] * call.from.pixel_stride, count);
      total[i] = A::multiply_add(left, right, total[i]);
    }
  }
  LOCO_UNROLL for (int i = 0; i < entries; ++i) A::store(sums + i * stride, total[i]);
}

// Add the gradients of some entries of one row over a part of the batch, for all channels.
template <typename E, int entries>
void gradient_channels(const ValueGradient& call, const int64_t* source, int64_t row, int64_t batch, int64_t batch_end,
                       typename E::Acc* sums) {
  for (int64_t channel = 0; channel < call.groups; channel += E::kWidth) {
    const bool whole = channel + E::kWidth <= call.groups;
    const auto tile = whole ? gradient_tile<E, entries, true> : gradient_tile<E, entries, false>;
    tile(call, source, row, batch, batch_end, channel, sums + channel);
  }
}

// Compute entries begin .. end - 1, whose sums all fit into `sums`.
template <typename E>
void gradient_entries(const ValueGradient& call, int64_t begin, int64_t end, int64_t row, typename E::Acc* sums) {
  const int64_t stride = sums_row<E>(call);
  for (int64_t k = 0; k < (end - begin) * stride; ++k) sums[k] = 0;
  for (int64_t batch = 0; batch < call.batch; batch += kBatch) {
    const int64_t batch_end = least(batch + kBatch, call.batch);
    int64_t at = row;
    for (int64_t entry = begin; entry < end;) {
      while (call.first[at + 1] <= entry) ++at;
      const int64_t count = least(kRows, least(end, call.first[at + 1]) - entry);
      const auto run = count == kRows ? gradient_channels<E, kRows> : gradient_channels<E, 1>;
      run(call, call.source + entry, at, batch, batch_end, sums + (entry - begin) * stride);
      entry += count == kRows ? kRows : 1;
    }
  }
  auto* values = static_cast<typename E::Storage*>(call.values);
  for (int64_t entry = begin; entry < end; ++entry) {
    store(call.dtype, sums + (entry - begin) * stride, values + entry * call.groups, call.groups);
  }
}

// Compute items begin .. end - 1; an item is an entry.
template <typename E>
void gradient_range(const ValueGradient& call, int64_t begin, int64_t end) {
  const int64_t stride = sums_row<E>(call);
  const int64_t most = stride < kSums ? kSums / stride : 1;
  const Memory<typename E::Acc> sums(most * stride);
  int64_t row = 0;
  for (int64_t entry = begin; entry < end; entry += most) {
    while (call.first[row + 1] <= entry) ++row;
    gradient_entries<E>(call, entry, least(entry + most, end), row, sums.data());
  }
}

const GradientKernels depthwise_value_gradients{
    {gradient_range<F64>, gradient_range<F32>, gradient_range<Bf16>, gradient_range<F16>}};

LOCO_KERNELS_END
}  // namespace loco::block_sparse
