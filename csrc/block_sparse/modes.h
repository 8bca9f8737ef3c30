// Modes: how stored elements become the words that an arithmetic multiplies.
//
// A mode packs matrices into contiguous panels of words. pack_rows packs a matrix whose rows follow the depth, [depth,
// columns] with a row stride, to [steps, to_row], padded with zeros. pack_left packs one whose rows lie across the
// depth, [rows, depth], to [rows, steps]. A step is one word along the depth. store converts sums back to elements.
// kInPlace tells whether any matrix can be read in place, without packing, and kVectorsInPlace whether vectors along
// the depth can.
#pragma once

#include <cstdint>
#include <cstring>

#include "block_sparse/tile.h"
#include "common/convert.h"
#include "common/dtype.h"

namespace loco::block_sparse {
LOCO_KERNELS_BEGIN

// The words are the elements themselves.
template <typename A>
struct Plain {
  using Arithmetic = A;
  using Storage = typename A::Word;
  using Word = typename A::Word;
  static constexpr bool kInPlace = true, kVectorsInPlace = true;

  static bool words_in_place(int64_t) { return true; }

  static void pack_rows(DType, const Storage* from, int64_t stride, int64_t rows, int64_t columns, Word* to,
                        int64_t to_row) {
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(to + i * to_row, from + i * stride, columns * sizeof(Word));
      for (int64_t j = columns; j < to_row; ++j) to[i * to_row + j] = 0;
    }
  }

  static void pack_left(DType dtype, const Storage* from, int64_t stride, int64_t rows, int64_t depth, Word* to) {
    pack_rows(dtype, from, stride, rows, depth, to, depth);
  }

  static void store(DType, const Word* from, Storage* to, int64_t count) {
    for (int64_t j = 0; j < count; ++j) to[j] = from[j];
  }
};

// Elements of half precision, which are converted to words.
template <typename A>
struct Converted {
  using Arithmetic = A;
  using Storage = uint16_t;
  using Word = typename A::Word;
  static constexpr bool kInPlace = false, kVectorsInPlace = false;

  static bool words_in_place(int64_t) { return false; }

  static void pack_rows(DType dtype, const Storage* from, int64_t stride, int64_t rows, int64_t columns, Word* to,
                        int64_t to_row) {
    for (int64_t i = 0; i < rows; ++i) {
      load(dtype, from + i * stride, to + i * to_row, columns);
      for (int64_t j = columns; j < to_row; ++j) to[i * to_row + j] = 0;
    }
  }

  static void pack_left(DType dtype, const Storage* from, int64_t stride, int64_t rows, int64_t depth, Word* to) {
    pack_rows(dtype, from, stride, rows, depth, to, depth);
  }

  static void store(DType dtype, const Word* from, Storage* to, int64_t count) { loco::store(dtype, from, to, count); }
};

// Words are pairs of bfloat16 along the depth, padded with a zero if the depth is odd.
template <typename A>
struct Pairs {
  using Arithmetic = A;
  using Storage = uint16_t;
  using Word = uint32_t;
  static constexpr bool kInPlace = false, kVectorsInPlace = true;

  static bool words_in_place(int64_t depth) { return depth % 2 == 0; }

  static void pack_rows(DType, const Storage* from, int64_t stride, int64_t rows, int64_t columns,
                        Word* __restrict__ to, int64_t to_row) {
    for (int64_t i = 0; i < rows; i += 2, to += to_row) {
      const Storage *low = from + i * stride, *high = i + 1 < rows ? low + stride : nullptr;
      for (int64_t j = 0; j < columns; j += A::kWidth) {
        A::pair(low + j, high ? high + j : nullptr, columns - j, to + j);
      }
      for (int64_t j = columns; j < to_row; ++j) to[j] = 0;
    }
  }

  static void pack_left(DType, const Storage* from, int64_t stride, int64_t rows, int64_t depth, Word* to) {
    const int64_t steps = (depth + 1) / 2;
    for (int64_t i = 0; i < rows; ++i, to += steps) {
      to[steps - 1] = 0;
      std::memcpy(to, from + i * stride, depth * sizeof(Storage));
    }
  }

  static void store(DType dtype, const typename A::Acc* from, Storage* to, int64_t count) {
    loco::store(dtype, from, to, count);
  }
};

// Write to[k][i] = from[i][k] for words, with from [rows, columns] whose rows are row_bytes apart and to [columns,
// rows] with row stride to_row in words. Full squares are transposed by Square::transpose.
template <typename Square, typename Word>
void transpose(const char* from, int64_t row_bytes, int64_t rows, int64_t columns, Word* to, int64_t to_row) {
  constexpr int64_t kSize = Square::kSize;
  for (int64_t i = 0; i < rows; i += kSize) {
    for (int64_t k = 0; k < columns; k += kSize) {
      const char* corner = from + i * row_bytes + k * static_cast<int64_t>(sizeof(Word));
      if (i + kSize <= rows && k + kSize <= columns) {
        Square::transpose(corner, row_bytes, to + k * to_row + i, to_row);
        continue;
      }
      const int64_t height = rows - i < kSize ? rows - i : kSize, width = columns - k < kSize ? columns - k : kSize;
      for (int64_t a = 0; a < height; ++a) {
        for (int64_t b = 0; b < width; ++b) {
          std::memcpy(to + (k + b) * to_row + i + a, corner + a * row_bytes + b * sizeof(Word), sizeof(Word));
        }
      }
    }
  }
}

LOCO_KERNELS_END
}  // namespace loco::block_sparse
