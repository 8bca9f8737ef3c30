// A tile of a matrix product, kept in registers.
//
//   to[i, j] = from[i, j] + sum over entries e and steps k of left[e, i, k] right[e, k, j]
//
// A tile has up to kRows rows and up to A::kVectors vectors of columns. For every step along the depth, each row's word
// of the left factor is broadcast and multiplied by a row of the right factor. Factors and TileSums give the layout and
// strides of all pointers. One thread computes all tiles of a panel, kRows rows at a time.
//
// Words are the operands of the arithmetic: a float, a double, or a pair of bfloat16 that are adjacent along the depth.
// The left factor is read in place, where rows and pixels may be powers of two apart, and each of its cache lines is
// read once. A is an arithmetic of vec.h.
#pragma once

#include <cstdint>

#include "common/vec.h"

namespace loco::block_sparse {
LOCO_KERNELS_BEGIN

constexpr int kRows = 6;
constexpr int64_t kLine = 64;        // bytes of a cache line
constexpr int64_t kAheadSteps = 16;  // steps between two prefetches: a cache line of floats

// The blocks that will be read next, to be prefetched during the product: `rows` rows of each of `entries` blocks.
struct Ahead {
  const char* data;
  int64_t block_bytes, row_bytes, lines;  // cache lines per row
  const int64_t* blocks;                  // [entries], their indices
  int64_t entries, rows;
  int64_t per_step;  // rows to prefetch every kAheadSteps steps
  int64_t entry = 0, row = 0;

  LOCO_HD void advance() {
    for (int64_t k = 0; k < per_step && entry < entries; ++k) {
      const char* at = data + blocks[entry] * block_bytes + row * row_bytes;
      for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(at + line * kLine, 0, 2);
      if (++row == rows) row = 0, ++entry;
    }
  }
};

// The factors of one product, which sums over entries and along the depth of each.
template <typename A>
struct Factors {
  const char* left;       // row i, step k of entry e: left + pixel of e * pixel_bytes + i * row_bytes + k * step_bytes
  const int64_t* pixels;  // the pixel of entry e is pixels[e * pixels_step]
  int64_t pixels_step, entries, pixel_bytes, row_bytes;
  int64_t steps, step_bytes;  // kStepsAdjacent: steps are one word apart; otherwise rows are, and step_bytes is read
  const typename A::Word* right;
  int64_t right_entry, right_step;  // row k of entry e is at right + e * right_entry + k * right_step
  int64_t next_pixel;               // the pixel to prefetch after the last entry, for the same rows
};

// Sums start from `from` and are written to `to`, or, for words that are pairs, rounded to `halves` if that is not
// null. Row strides are in elements; from_row may be 0.
template <typename A>
struct TileSums {
  const typename A::Acc* from;
  int64_t from_row;
  typename A::Acc* to;
  int64_t to_row;
  uint16_t* halves = nullptr;
  int64_t halves_row = 0;
};

template <typename A, int rows, int vectors, bool kStepsAdjacent>
__attribute__((noinline)) void tile(const Factors<A>& f, int64_t row, const TileSums<A>& sums, Ahead* ahead) {
  using Word = typename A::Word;
  typename A::Vec acc[rows][vectors];
  const typename A::Acc* from = sums.from + row * sums.from_row;
  LOCO_UNROLL for (int i = 0; i < rows; ++i) {
    LOCO_UNROLL for (int j = 0; j < vectors; ++j) acc[i][j] = A::load(from + i * sums.from_row + j * A::kWidth);
  }
  const int64_t row_bytes = kStepsAdjacent ? f.row_bytes : static_cast<int64_t>(sizeof(Word));
  const int64_t step_bytes = kStepsAdjacent ? static_cast<int64_t>(sizeof(Word)) : f.step_bytes;
  const char* left_row = f.left + row * row_bytes;
  for (int64_t e = 0; e < f.entries; ++e) {
    const char* left = left_row + f.pixels[e * f.pixels_step] * f.pixel_bytes;
    const int64_t next_pixel = e + 1 < f.entries ? f.pixels[(e + 1) * f.pixels_step] : f.next_pixel;
    const char* next = left_row + next_pixel * f.pixel_bytes;
    const Word* right = f.right + e * f.right_entry;
    const int64_t chunk = kStepsAdjacent ? kAheadSteps : f.steps;
    for (int64_t begin = 0; begin < f.steps; begin += chunk) {
      if constexpr (kStepsAdjacent) {
        LOCO_UNROLL for (int i = 0; i < rows; ++i) __builtin_prefetch(next + i * row_bytes + begin * step_bytes, 0, 3);
        ahead->advance();
      }
      const int64_t end = begin + chunk < f.steps ? begin + chunk : f.steps;
      for (int64_t k = begin; k < end; ++k) {
        typename A::In b[vectors];
        LOCO_UNROLL for (int j = 0; j < vectors; ++j) b[j] = A::words(right + k * f.right_step + j * A::kWidth);
        LOCO_UNROLL for (int i = 0; i < rows; ++i) {
          const typename A::In a = A::broadcast(left + i * row_bytes + k * step_bytes);
          LOCO_UNROLL for (int j = 0; j < vectors; ++j) acc[i][j] = A::multiply_add(a, b[j], acc[i][j]);
        }
      }
    }
  }
  if constexpr (A::kPair == 2) {
    if (sums.halves) {
      uint16_t* to = sums.halves + row * sums.halves_row;
      LOCO_UNROLL for (int i = 0; i < rows; ++i) {
        LOCO_UNROLL for (int j = 0; j < vectors; ++j) A::round(acc[i][j], to + i * sums.halves_row + j * A::kWidth);
      }
      return;
    }
  }
  typename A::Acc* to = sums.to + row * sums.to_row;
  LOCO_UNROLL for (int i = 0; i < rows; ++i) {
    LOCO_UNROLL for (int j = 0; j < vectors; ++j) A::store(to + i * sums.to_row + j * A::kWidth, acc[i][j]);
  }
}

template <typename A>
using Tile = void (*)(const Factors<A>&, int64_t, const TileSums<A>&, Ahead*);

template <typename A, bool kStepsAdjacent, int R = kRows, int V = A::kVectors>
Tile<A> tile_of(int64_t rows, int64_t vectors) {
  if constexpr (R > 1) {
    if (rows < R) return tile_of<A, kStepsAdjacent, R - 1, V>(rows, vectors);
  }
  if constexpr (V > 1) {
    if (vectors < V) return tile_of<A, kStepsAdjacent, R, V - 1>(rows, vectors);
  }
  return tile<A, R, V, kStepsAdjacent>;
}

// Compute all tiles of `rows` rows and the given number of vectors of columns.
template <typename A, bool kStepsAdjacent>
void tiles(const Factors<A>& factors, int64_t rows, int64_t vectors, const TileSums<A>& sums, Ahead* ahead) {
  const Tile<A> whole = tile_of<A, kStepsAdjacent>(kRows, vectors);
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) whole(factors, row, sums, ahead);
  if (row < rows) tile_of<A, kStepsAdjacent>(rows - row, vectors)(factors, row, sums, ahead);
}

LOCO_KERNELS_END
}  // namespace loco::block_sparse
