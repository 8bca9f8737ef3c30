// Code shared by the panels of products and value gradients.
//
// product: a panel is a row of `to` for a part of the batch and as many channels as a tile is wide. The row's entries
// are taken in strips of a limited number of steps, so that their blocks stay in cache over all tiles or, where they
// have to be packed, fit into scratch memory; entries of short depth are joined to runs. Sums stay in registers during
// a strip. Products with few output channels have tiles of another kind (narrow.h).
//
// value_gradient: the depth is the batch, a panel is a part of a block, and the rows of its tiles are channels of
// `from`.
//
// The terms of a sum are added in one order, whichever thread computes it and whatever is computed beside it:
// everything that the order depends on, such as runs of entries, follows only from the pattern and the block size.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "block_sparse/cpu.h"
#include "block_sparse/tile.h"
#include "common/convert.h"

namespace loco::block_sparse {
LOCO_KERNELS_BEGIN

constexpr int64_t kStripSteps = 64, kStripStepsInPlace = 640;
constexpr int64_t kSquareRows = 16;
constexpr int64_t kShort = 16;  // entries of smaller depth are joined to runs
constexpr int64_t kMostRowsAhead = 8;
constexpr int64_t kMostBatch = 256, kMostBatchPacked = 128;  // samples in one panel, at most

LOCO_HD int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
LOCO_HD int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
LOCO_HD int64_t pieces(int64_t count, int64_t most) { return (count + most - 1) / most; }
// Return the length of pieces of about equal length, none longer than `most`.
LOCO_HD int64_t piece_length(int64_t count, int64_t most) { return count > 0 ? pieces(count, pieces(count, most)) : 1; }

// Return the number of samples in one panel, which is even if there are several panels.
template <typename M>
int64_t panel_batch(int64_t batch) {
  constexpr int64_t kMost = M::kInPlace ? kMostBatch : kMostBatchPacked;
  if (batch <= kMost) return batch > 0 ? batch : 1;
  return (piece_length(batch, kMost) + 1) / 2 * 2;
}

// Return how many entries from `entry` on, before `end`, are joined to one entry of a multiple of the depth: more than
// one if the depth is short and the pixels follow each other, as their blocks do.
template <typename Call>
LOCO_HD int64_t run_length(const Call& call, int64_t entry, int64_t end) {
  int64_t run = 1;
  if (call.depth >= kShort || call.groups != 1) return run;
  while (entry + run < end && call.source[entry + run] == call.source[entry] + run) ++run;
  return run;
}

// Modes: how stored elements become the words that an arithmetic multiplies.
//
// A mode packs matrices into contiguous panels of words. pack_rows packs a matrix whose rows follow the depth, [depth,
// columns] with a row stride, to [steps, to_row], padded with zeros. pack_left packs one whose rows lie across the
// depth, [rows, depth], to [rows, steps]. A step is one word along the depth. store converts sums back to elements.
// kInPlace tells whether any matrix can be read in place, without packing, and kVectorsInPlace whether vectors along
// the depth can.

// The words are the elements themselves, or what elements of half precision are converted to.
template <typename A, typename Element = typename A::Word>
struct Single {
  using Arithmetic = A;
  using Storage = Element;
  using Word = typename A::Word;
  static constexpr bool kInPlace = std::is_same_v<Element, Word>, kVectorsInPlace = kInPlace;

  static bool words_in_place(int64_t) { return kInPlace; }

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

using Half = Single<Lanes<float>, uint16_t>;

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

struct Counting {
  int64_t number[kStripSteps] = {};
  constexpr Counting() {
    for (int64_t i = 0; i < kStripSteps; ++i) number[i] = i;
  }
};
inline constexpr Counting kCounting;

// Uninitialised memory, aligned to cache lines and sharing none with other data.
template <typename T>
class AlignedBuffer {
 public:
  explicit AlignedBuffer(int64_t count)
      : data_(count ? static_cast<T*>(std::aligned_alloc(kLine, pieces(count * sizeof(T), kLine) * kLine)) : nullptr) {
    if (count && !data_) std::abort();
  }
  ~AlignedBuffer() { std::free(data_); }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;

  T* data() const { return data_; }

 private:
  T* data_;
};

// Scratch memory for packed words and sums of a panel, whose numbers are given: on the stack, or on the heap if it does
// not fit there.
template <typename M>
class Scratch {
  using Word = typename M::Word;
  using Acc = typename M::Arithmetic::Acc;
  static_assert(alignof(Word) == alignof(Acc), "sums follow words");
  static constexpr int64_t kNear = 1 << 15;  // bytes on the stack

 public:
  static constexpr int64_t kPanel = M::Arithmetic::kWidth * M::Arithmetic::kVectors;

  Scratch(int64_t right, int64_t left, int64_t transposed, int64_t sums)
      : far_(bytes(right + left + transposed, sums) > kNear ? bytes(right + left + transposed, sums) : 0),
        right_(reinterpret_cast<Word*>(far_.data() ? far_.data() : near_)),
        left_(right_ + right),
        transposed_(left_ + left),
        sums_(reinterpret_cast<Acc*>(transposed_ + transposed)) {}

  Word* right() { return right_; }
  Word* left() { return left_; }
  Word* transposed() { return transposed_; }
  Acc* sums() { return sums_; }
  Acc* start() { return start_; }

 private:
  static int64_t bytes(int64_t words, int64_t sums) { return words * sizeof(Word) + sums * sizeof(Acc); }

  alignas(kLine) char near_[kNear];
  alignas(kLine) Acc start_[kPanel];
  const AlignedBuffer<char> far_;
  Word *const right_, *const left_, *const transposed_;
  Acc* const sums_;
};

// Return the number of columns of a panel, in whole vectors.
template <typename M>
int64_t panel_row(int64_t width) {
  constexpr int64_t kWidth = M::Arithmetic::kWidth;
  return least(Scratch<M>::kPanel, pieces(width, kWidth) * kWidth);
}

LOCO_KERNELS_END
}  // namespace loco::block_sparse
