// Products with transposed blocks of at most kNarrow rows, as for gradients of images with few channels.
//
//   to[n, row, g, c] = sum over entries e of the row, sum over k of from[n, source[e], g, k] values[blocks[e], g, c, k]
//
// from is [batch, pixels, groups * depth], to is [batch, rows, groups * width], with strides as in cpu.h, and values is
// contiguous [blocks, groups, width, depth]. So vectors lie along the depth k. Each sum is accumulated in the lanes of
// one vector, which are added at the end.
//
// A thread computes one row of `to` for a part of the batch at a time: group by group, in tiles of as many samples as
// registers can hold the sums of, and all `width` channels.
#pragma once

#include <cstring>

#include "block_sparse/panels.h"

namespace loco::block_sparse {
LOCO_KERNELS_BEGIN

constexpr int kNarrow = 4;  // the most channels of a group in `to`

template <typename M>
bool is_narrow(const Product& call) {
  using A = typename M::Arithmetic;
  return call.blocks && !call.bias && call.width > 0 && call.width <= kNarrow && call.depth > 0 &&
         call.depth % (A::kWidth * A::kPair) == 0;
}

template <typename A, typename Storage>
LOCO_HD typename A::In words(const Storage* at) {
  return A::words(reinterpret_cast<const typename A::Word*>(at));
}

// Compute all channels of one row and group for some samples.
template <typename M, int samples, int width>
void narrow_tile(const Product& call, int64_t row, int64_t batch, int64_t group) {
  using A = typename M::Arithmetic;
  using Storage = typename M::Storage;
  constexpr int64_t kLanes = A::kWidth * A::kPair;
  const auto* const from =
      static_cast<const Storage*>(call.from.data) + batch * call.from.batch_stride + group * call.depth;
  const auto* const values = static_cast<const Storage*>(call.values) + group * call.depth * width;
  const typename A::Acc zeros[A::kWidth] = {};
  typename A::Vec sums[samples][kNarrow];  // zeros beyond `width`
  LOCO_UNROLL for (int i = 0; i < samples; ++i) {
    LOCO_UNROLL for (int c = 0; c < kNarrow; ++c) sums[i][c] = A::load(zeros);
  }
  const int64_t end = call.first[row + 1], depth = call.depth, stride = call.from.batch_stride;
  for (int64_t entry = call.first[row]; entry < end; ++entry) {
    const auto* x = from + call.source[entry] * call.from.pixel_stride;
    const auto* block = values + call.blocks[entry] * call.groups * depth * width;
    for (const auto* const last = block + depth; block < last; x += kLanes, block += kLanes) {
      typename A::In v[width];
      LOCO_UNROLL for (int c = 0; c < width; ++c) v[c] = words<A>(block + c * depth);
      // The processor's addressing modes give three addresses from each base for free, but not more.
      LOCO_UNROLL for (int i = 0; i < samples; ++i) {
        const typename A::In word = words<A>(x + i / 3 * 3 * stride + i % 3 * stride);
        LOCO_UNROLL for (int c = 0; c < width; ++c) sums[i][c] = A::multiply_add(word, v[c], sums[i][c]);
      }
    }
  }
  auto* to =
      static_cast<Storage*>(call.to.data) + batch * call.to.batch_stride + row * call.to.pixel_stride + group * width;
  LOCO_UNROLL for (int i = 0; i < samples; ++i) {
    Storage totals[kNarrow];
    A::totals(sums[i], totals);
    std::memcpy(to + i * call.to.batch_stride, totals, width * sizeof(Storage));
  }
}

// Compute `rows` samples from `batch` on, in tiles of as many as registers allow.
template <typename M, int width, int samples = M::Arithmetic::kVectors <= 2 ? kRows / 2 : kRows>
void narrow_samples(const Product& call, int64_t row, int64_t batch, int64_t rows, int64_t group) {
  for (; rows >= samples; rows -= samples, batch += samples) narrow_tile<M, samples, width>(call, row, batch, group);
  if constexpr (samples > 1) narrow_samples<M, width, samples - 1>(call, row, batch, rows, group);
}

// Compute one row of `to` for `rows` samples from `batch` on.
template <typename M, int width = kNarrow>
void narrow_product(const Product& call, int64_t row, int64_t batch, int64_t rows) {
  if constexpr (width > 1) {
    if (call.width < width) return narrow_product<M, width - 1>(call, row, batch, rows);
  }
  for (int64_t group = 0; group < call.groups; ++group) narrow_samples<M, width>(call, row, batch, rows, group);
}

LOCO_KERNELS_END
}  // namespace loco::block_sparse
