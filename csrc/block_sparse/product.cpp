// Products with blocks of more than one element, for one instruction set and mode (see panels.h).
//
//   to[n, r, g, c] = bias[r, g, c] + sum over entries e of row r, sum over k of from[n, source[e], g, k] B_e[g, k, c]
//
// B_e is values[e], [groups, depth, width], or, if `blocks` is given, values[blocks[e]], [groups, width, depth],
// transposed. from is [batch, pixels, groups * depth] and to [batch, rows, groups * width], with the strides of Pixels
// (cpu.h) and contiguous channels; bias is contiguous [rows, groups * width], and `first` [rows + 1] gives each row's
// entries.
//
// An item is one row of `to` for one part of the batch. The thread that has it computes one panel after the other: for
// each group, as many channels as a tile is wide. A panel takes its entries strip by strip, packs the factors where
// they cannot be read in place, and adds their product to its sums by tiles (tile.h), which prefetch the transposed
// blocks of the next strip.
#include <cstring>

#include "block_sparse/narrow.h"
#include "block_sparse/panels.h"

namespace loco::block_sparse {
LOCO_KERNELS_BEGIN

// A panel: `rows` samples from `batch` on, and the channels of a group from `column` on that fit into a tile.
template <typename M>
class ProductPanel {
  using A = typename M::Arithmetic;
  using Word = typename M::Word;
  using Acc = typename A::Acc;
  using Storage = typename M::Storage;

 public:
  ProductPanel(const Product& call, Scratch<M>& scratch, int64_t batch, int64_t rows, int64_t group, int64_t column)
      : call_(call),
        scratch_(scratch),
        rows_(rows),
        group_(group),
        column_(column),
        columns_(least(Scratch<M>::kPanel, call.width - column)),
        vectors_(pieces(columns_, A::kWidth)),
        row_(vectors_ * A::kWidth),
        block_(call.depth * call.width),
        adjacent_(call.from.pixel_stride == call.depth),
        whole_(columns_ == row_),
        right_in_place_(M::kInPlace && whole_ && !call.blocks),
        values_(static_cast<const Storage*>(call.values) + group * block_),
        from_(static_cast<const Storage*>(call.from.data) + batch * call.from.batch_stride + group * call.depth),
        to_(static_cast<Storage*>(call.to.data) + batch * call.to.batch_stride + group * call.width + column) {}

  void run(int64_t row) {
    const int64_t end = call_.first[row + 1];
    Storage* to = to_ + row * call_.to.pixel_stride;
    // Packing transposed blocks does not write beyond the last channel, so clear those columns.
    if (call_.blocks && columns_ < row_) std::memset(scratch_.right(), 0, kStripSteps * row_ * sizeof(Word));
    TileSums<A> sums{start(row), 0, scratch_.sums(), row_};
    Strip strip{};
    strip.next_entry = call_.first[row];
    do {
      strip = strip_after(strip, end);
      const bool last = whole_ && strip.next_entry == end;
      if constexpr (M::kInPlace) {
        if (whole_) sums.to = to, sums.to_row = call_.to.batch_stride;
      } else if constexpr (A::kPair == 2) {
        if (last && strip.runs > 0) sums.halves = to, sums.halves_row = call_.to.batch_stride;
      }
      add(strip, sums, end);
      sums.from = sums.to, sums.from_row = sums.to_row;
    } while (strip.next_entry < end);
    if (whole_ && (M::kInPlace || sums.halves)) return;
    for (int64_t i = 0; i < rows_; ++i) {
      M::store(call_.dtype, scratch_.sums() + i * row_, to + i * call_.to.batch_stride, columns_);
    }
  }

 private:
  // All steps of `runs` runs of entries, each of `pixels` pixels, or some steps of a single run.
  struct Strip {
    int64_t entry, pixels, runs, step, steps;
    int64_t depth;  // elements in these steps
    int64_t next_entry, next_step;
    bool left_in_place;
  };

  // If words are pairs, runs affect the order of a sum's terms, so pixels that are not adjacent form runs, too.
  int64_t run_at(int64_t entry, int64_t end) const {
    return call_.blocks || !(adjacent_ || A::kPair > 1) ? 1 : run_length(call_, entry, end);
  }

  Strip strip_after(const Strip& last, int64_t end) const {
    Strip strip{};
    strip.entry = strip.next_entry = last.next_entry, strip.step = last.next_step;
    strip.pixels = strip.step > 0 ? last.pixels : run_at(strip.entry, end);
    const int64_t depth = strip.pixels * call_.depth, all = pieces(depth, A::kPair);
    const int64_t most = right_in_place_ ? kStripStepsInPlace : kStripSteps, length = piece_length(all, most);
    strip.left_in_place = M::words_in_place(depth) && (strip.pixels == 1 || adjacent_);
    strip.steps = least(length, all - strip.step);
    strip.depth = least(strip.steps * A::kPair, depth - strip.step * A::kPair);
    if (length < all) {
      strip.runs = strip.entry < end;
      const bool done = strip.step + strip.steps == all;
      if (done) strip.next_entry = least(strip.entry + strip.pixels, end);
      strip.next_step = done ? 0 : strip.step + strip.steps;
      return strip;
    }
    while (strip.next_entry < end && (strip.runs + 1) * length <= most &&
           run_at(strip.next_entry, end) == strip.pixels) {
      ++strip.runs, strip.next_entry += strip.pixels;
    }
    return strip;
  }

  const Acc* start(int64_t row) {
    for (int64_t j = 0; j < row_; ++j) scratch_.start()[j] = 0;
    if (call_.bias) {
      const int64_t at = (row * call_.groups + group_) * call_.width + column_;
      load(call_.dtype, static_cast<const Storage*>(call_.bias) + at, scratch_.start(), columns_);
    }
    return scratch_.start();
  }

  // Return the panel's part of a block, from a step on.
  const Storage* part(int64_t index, int64_t step, int64_t column) const {
    const int64_t k = step * A::kPair;
    const int64_t at = call_.blocks ? column * call_.depth + k : k * call_.width + column;
    return values_ + index * call_.groups * block_ + at;
  }

  void add(const Strip& strip, const TileSums<A>& sums, int64_t end) {
    Factors<A> f;
    f.entries = strip.runs, f.steps = strip.steps, f.step_bytes = sizeof(Word);
    if (strip.left_in_place) {
      f.left = reinterpret_cast<const char*>(from_ + strip.step * A::kPair);
      f.pixels = call_.source + strip.entry, f.pixels_step = strip.pixels;
      f.pixel_bytes = call_.from.pixel_stride * sizeof(Storage),
      f.row_bytes = call_.from.batch_stride * sizeof(Storage);
      f.next_pixel = strip.next_entry < end ? call_.source[strip.next_entry] : 0;
    } else {
      f.left = reinterpret_cast<const char*>(scratch_.left());
      f.pixels = kCounting.number, f.pixels_step = 1;
      f.row_bytes = strip.steps * sizeof(Word), f.pixel_bytes = rows_ * f.row_bytes;
      f.next_pixel = 0;
      for (int64_t e = 0; e < strip.runs; ++e) {
        pack_left(strip, strip.entry + e * strip.pixels, scratch_.left() + e * rows_ * strip.steps);
      }
    }
    if (right_in_place_) {
      f.right = reinterpret_cast<const Word*>(part(strip.entry, strip.step, column_));
      f.right_step = call_.width, f.right_entry = strip.pixels * call_.groups * block_;
    } else {
      f.right = scratch_.right(), f.right_step = row_, f.right_entry = strip.steps * row_;
      for (int64_t e = 0; e < strip.runs; ++e) {
        pack_right(strip, strip.entry + e * strip.pixels, scratch_.right() + e * f.right_entry);
      }
    }
    Ahead ahead = ahead_of(strip);
    tiles<A, true>(f, rows_, vectors_, sums, &ahead);
  }

  void pack_left(const Strip& strip, int64_t entry, Word* to) {
    const Storage* from = from_ + call_.source[entry] * call_.from.pixel_stride;
    const int64_t first = strip.step * A::kPair, stride = call_.from.batch_stride;
    if (strip.pixels == 1 || adjacent_) return M::pack_left(call_.dtype, from + first, stride, rows_, strip.depth, to);
    for (int64_t i = 0; i < rows_; ++i, from += stride, to += strip.steps) {
      to[strip.steps - 1] = 0;
      for (int64_t k = 0; k < strip.depth; ++k) {
        const int64_t pixel = (first + k) / call_.depth, channel = (first + k) % call_.depth;
        reinterpret_cast<Storage*>(to)[k] = from[pixel * call_.from.pixel_stride + channel];
      }
    }
  }

  void pack_right(const Strip& strip, int64_t entry, Word* to) {
    if (!call_.blocks) {
      return M::pack_rows(call_.dtype, part(entry, strip.step, column_), call_.width, strip.depth, columns_, to, row_);
    }
    using Square = typename A::Square;
    const Storage* from = part(call_.blocks[entry], strip.step, column_);
    if (strip.left_in_place) {
      return transpose<Square>(reinterpret_cast<const char*>(from), call_.depth * sizeof(Storage), columns_,
                               strip.steps, to, row_);
    }
    for (int64_t i = 0; i < columns_; i += kSquareRows) {
      const int64_t rows = least(kSquareRows, columns_ - i);
      M::pack_left(call_.dtype, from + i * call_.depth, call_.depth, rows, strip.depth, scratch_.transposed());
      transpose<Square>(reinterpret_cast<const char*>(scratch_.transposed()), strip.steps * sizeof(Word), rows,
                        strip.steps, to + i, row_);
    }
  }

  // Return the parts of the transposed blocks that the next strip reads; others are read in order, which the processor
  // foresees.
  Ahead ahead_of(const Strip& strip) const {
    Ahead ahead{};
    if (!call_.blocks) return ahead;
    ahead.entries = least(strip.runs, call_.first[call_.rows] - strip.next_entry);
    if (ahead.entries <= 0) return ahead;
    ahead.blocks = call_.blocks + strip.next_entry;
    ahead.data = reinterpret_cast<const char*>(part(0, strip.next_step, column_));
    ahead.block_bytes = call_.groups * block_ * sizeof(Storage);
    ahead.row_bytes = call_.depth * sizeof(Storage);
    ahead.rows = columns_;
    ahead.lines = pieces(strip.depth * sizeof(Storage), kLine);
    const int64_t times = strip.runs * pieces(strip.steps, kAheadSteps) * pieces(rows_, kRows);
    ahead.per_step = least(pieces(ahead.entries * ahead.rows, times), kMostRowsAhead);
    return ahead;
  }

  const Product& call_;
  Scratch<M>& scratch_;
  const int64_t rows_, group_, column_, columns_, vectors_, row_, block_;
  const bool adjacent_, whole_, right_in_place_;
  const Storage *values_, *from_;
  Storage* to_;
};

// Return the number of samples in one panel, which is smaller if there are too few rows for many threads.
template <typename M>
int64_t product_batch(const Product& call) {
  constexpr int64_t kFewRows = 64, kLittleBatch = 64;
  return call.rows < kFewRows ? piece_length(call.batch, kLittleBatch) : panel_batch<M>(call.batch);
}

template <typename M>
int64_t product_items(const Product& call) {
  return call.rows * pieces(call.batch, product_batch<M>(call));
}

// Return the scratch memory for panels of `rows` samples.
template <typename M>
Scratch<M> product_scratch(const Product& call, int64_t rows) {
  if constexpr (M::kVectorsInPlace) {
    if (is_narrow<M>(call)) return {0, 0, 0, 0};
  }
  const int64_t row = panel_row<M>(call.width);
  const bool whole = call.width % M::Arithmetic::kWidth == 0;
  const bool left_in_place = M::kInPlace || (call.depth >= kShort && M::words_in_place(call.depth));
  return {M::kInPlace && whole && !call.blocks ? 0 : kStripSteps * row, left_in_place ? 0 : rows * kStripSteps,
          left_in_place ? 0 : kSquareRows * kStripSteps, M::kInPlace && whole ? 0 : rows * row};
}

// Compute items begin .. end - 1. Items are ordered by row of `to`, then part of the batch.
template <typename M>
void product_range(const Product& call, int64_t begin, int64_t end) {
  const int64_t most = product_batch<M>(call), parts = pieces(call.batch, most);
  Scratch<M> scratch = product_scratch<M>(call, least(most, call.batch));
  for (int64_t item = begin; item < end; ++item) {
    const int64_t batch = item % parts * most, rows = least(most, call.batch - batch);
    if constexpr (M::kVectorsInPlace) {
      if (is_narrow<M>(call)) {
        narrow_product<M>(call, item / parts, batch, rows);
        continue;
      }
    }
    for (int64_t group = 0; group < call.groups; ++group) {
      for (int64_t column = 0; column < call.width; column += Scratch<M>::kPanel) {
        ProductPanel<M>(call, scratch, batch, rows, group, column).run(item / parts);
      }
    }
  }
}

#ifdef LOCO_AVX512_BF16
const ProductKernels products{{{}, {}, {product_items<Pairs<Bf16Pairs>>, product_range<Pairs<Bf16Pairs>>}, {}}};
#else
const ProductKernels products{{{product_items<Single<Lanes<double>>>, product_range<Single<Lanes<double>>>},
                               {product_items<Single<Lanes<float>>>, product_range<Single<Lanes<float>>>},
                               {product_items<Half>, product_range<Half>},
                               {product_items<Half>, product_range<Half>}}};
#endif

LOCO_KERNELS_END
}  // namespace loco::block_sparse
