// What the panels of products and value gradients share.
//
// product: a panel is a row of `to`, some of the batch, and as many of its channels as a tile is wide. The row's
// entries come in strips of so many steps that their blocks stay in cache over all tiles, or, where they have to be
// packed, fit into scratch memory; entries of short depth run together. Sums stay in registers during a strip. Products
// to few channels have tiles of another kind (narrow.h). value_gradient: the depth is the batch, a panel is a part of a
// block, its tiles' rows are channels of `from`.
//
// A sum's terms are added in one order, whoever computes it and whatever lies beside it: what that order depends on, as
// runs of entries do, follows from pattern and block size alone.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "block_sparse/cpu.h"
#include "block_sparse/modes.h"
#include "block_sparse/tile.h"

namespace loco::block_sparse {

constexpr int64_t kStripSteps = 64, kStripStepsInPlace = 640;
constexpr int64_t kSquareRows = 16;
constexpr int64_t kShort = 16;  // depths below this run together
constexpr int64_t kMostRowsAhead = 8;
constexpr int64_t kMostBatch = 256, kMostBatchPacked = 128;  // of one panel

LOCO_HD int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
LOCO_HD int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
LOCO_HD int64_t pieces(int64_t count, int64_t most) { return (count + most - 1) / most; }
// The length of pieces of about equal length, none longer than `most`.
LOCO_HD int64_t piece_length(int64_t count, int64_t most) { return count > 0 ? pieces(count, pieces(count, most)) : 1; }

// Of the batch, what one panel takes: an even number where there are several.
template <typename M>
int64_t panel_batch(int64_t batch) {
  constexpr int64_t kMost = M::kInPlace ? kMostBatch : kMostBatchPacked;
  if (batch <= kMost) return batch > 0 ? batch : 1;
  return (piece_length(batch, kMost) + 1) / 2 * 2;
}

// How many entries from `entry` on, before `end`, are taken for one of so many times the depth: where that is short,
// and pixels follow each other, as their blocks do.
template <typename Call>
LOCO_HD int64_t run_length(const Call& call, int64_t entry, int64_t end) {
  int64_t run = 1;
  if (call.depth >= kShort || call.groups != 1) return run;
  while (entry + run < end && call.source[entry + run] == call.source[entry] + run) ++run;
  return run;
}

struct Counting {
  int64_t number[kStripSteps] = {};
  constexpr Counting() {
    for (int64_t i = 0; i < kStripSteps; ++i) number[i] = i;
  }
};
inline constexpr Counting kCounting;

// Uninitialised, and on lines of its own.
template <typename T>
class Memory {
 public:
  explicit Memory(int64_t count)
      : held_(count ? static_cast<T*>(std::aligned_alloc(kLine, pieces(count * sizeof(T), kLine) * kLine)) : nullptr) {
    if (count && !held_) std::abort();
  }
  ~Memory() { std::free(held_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  T* data() const { return held_; }

 private:
  T* held_;
};

// What a panel packs and adds up, of so many words and sums: on the stack, or if there is no room on the heap.
template <typename M>
class Scratch {
  using Word = typename M::Word;
  using Acc = typename M::Arithmetic::Acc;
  static_assert(alignof(Word) == alignof(Acc), "sums follow words");
  static constexpr int64_t kNear = 1 << 15;  // bytes

 public:
  static constexpr int64_t kPanel = M::Arithmetic::kWidth * M::Arithmetic::kVectors;

  Scratch(int64_t right, int64_t left, int64_t turned, int64_t sums)
      : far_(bytes(right + left + turned, sums) > kNear ? bytes(right + left + turned, sums) : 0),
        right_(reinterpret_cast<Word*>(far_.data() ? far_.data() : near_)),
        left_(right_ + right),
        turned_(left_ + left),
        sums_(reinterpret_cast<Acc*>(turned_ + turned)) {}

  Word* right() { return right_; }
  Word* left() { return left_; }
  Word* turned() { return turned_; }
  Acc* sums() { return sums_; }
  Acc* start() { return start_; }

 private:
  static int64_t bytes(int64_t words, int64_t sums) { return words * sizeof(Word) + sums * sizeof(Acc); }

  alignas(kLine) char near_[kNear];
  alignas(kLine) Acc start_[kPanel];
  const Memory<char> far_;
  Word *const right_, *const left_, *const turned_;
  Acc* const sums_;
};

// Columns of a panel, in whole vectors.
template <typename M>
int64_t panel_row(int64_t width) {
  constexpr int64_t kWidth = M::Arithmetic::kWidth;
  return least(Scratch<M>::kPanel, pieces(width, kWidth) * kWidth);
}

}  // namespace loco::block_sparse
