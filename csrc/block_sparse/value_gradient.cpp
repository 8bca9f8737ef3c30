// Value gradients of blocks of more than one element, for one instruction set and mode (see panels.h).
//
//   values[e, g, k, c] = sum over n of from[n, source[e], g, k] to[n, row of e, g, c]
//
// from is [batch, pixels, groups * depth] and to [batch, rows, groups * width], with the strides of Pixels (cpu.h) and
// contiguous channels; values is contiguous [entries, groups, depth, width], and `first` [rows + 1] gives each row's
// entries.
//
// An item is an entry. A thread takes its entries in runs, and of each run one panel after the other: some channels of
// `from` (tile rows) by as many channels of `to` as a tile is wide. The depth of the product is the batch, taken in
// parts whose rows of `to` are packed once and kept while they stay the same.
#include "block_sparse/panels.h"

namespace loco::block_sparse {
LOCO_KERNELS_BEGIN

template <typename M>
class ValueGradientPanels {
  using A = typename M::Arithmetic;
  using Word = typename M::Word;
  using Acc = typename A::Acc;
  using Storage = typename M::Storage;
  static constexpr int64_t kDepth = M::kInPlace ? kMostBatch : kStripSteps;

 public:
  ValueGradientPanels(const ValueGradient& call, Scratch<M>& scratch)
      : call_(call), scratch_(scratch), part_(panel_batch<M>(call.batch)) {
    for (int64_t j = 0; j < Scratch<M>::kPanel; ++j) scratch_.start()[j] = 0;
  }

  static Scratch<M> scratch_for(const ValueGradient& call) {
    const int64_t row = panel_row<M>(call.width), steps = pieces(panel_batch<M>(call.batch), A::kPair);
    const bool in_place = M::kInPlace && call.width % A::kWidth == 0;
    return {steps * row, M::kInPlace ? 0 : steps * kDepth, 0, in_place ? 0 : kDepth * row};
  }

  // Compute a run of entries, all of which are in `row`.
  void run(int64_t entry, int64_t entries, int64_t row) {
    for (int64_t group = 0; group < call_.groups; ++group) {
      for (int64_t column = 0; column < call_.width; column += Scratch<M>::kPanel) {
        for (int64_t channel = 0; channel < entries * call_.depth; channel += kDepth) {
          panel(entry, row, group, column, channel, least(kDepth, entries * call_.depth - channel));
        }
      }
    }
  }

 private:
  // Compute one panel: `depth` channels of `from` from `channel` on.
  void panel(int64_t entry, int64_t row, int64_t group, int64_t column, int64_t channel, int64_t depth) {
    const int64_t columns = least(Scratch<M>::kPanel, call_.width - column);
    const int64_t vectors = pieces(columns, A::kWidth), to_row = vectors * A::kWidth;
    const int64_t block = (entry * call_.groups + group) * call_.depth * call_.width;
    Storage* values = static_cast<Storage*>(call_.values) + block + channel * call_.width + column;
    const bool whole = columns == to_row;
    TileSums<A> sums{scratch_.start(), 0, scratch_.sums(), to_row};
    if constexpr (M::kInPlace) {
      if (whole) sums.to = values, sums.to_row = call_.width;
    }
    const Storage* from = static_cast<const Storage*>(call_.from.data) + call_.source[entry] * call_.from.pixel_stride +
                          group * call_.depth + channel;
    for (int64_t batch = 0; batch < call_.batch; batch += part_) {
      const int64_t rows = least(part_, call_.batch - batch);
      if constexpr (A::kPair == 2) {
        if (whole && batch + rows == call_.batch) sums.halves = values, sums.halves_row = call_.width;
      }
      pack_right({row, group, column, batch}, rows, columns, to_row);
      add(from + batch * call_.from.batch_stride, rows, depth, vectors, sums);
      sums.from = sums.to, sums.from_row = sums.to_row;
    }
    if (whole && (M::kInPlace || sums.halves)) return;
    for (int64_t i = 0; i < depth; ++i) {
      M::store(call_.dtype, sums.from + i * sums.from_row, values + i * call_.width, columns);
    }
  }

  // Identifies the part of `to` that is packed in scratch_.right().
  struct Key {
    int64_t row, group, column, batch;

    bool operator==(const Key& other) const {
      return row == other.row && group == other.group && column == other.column && batch == other.batch;
    }
  };

  void pack_right(const Key& key, int64_t rows, int64_t columns, int64_t to_row) {
    if (key == cached_) return;
    cached_ = key;
    const Storage* to = static_cast<const Storage*>(call_.to.data) + key.batch * call_.to.batch_stride +
                        key.row * call_.to.pixel_stride + key.group * call_.width + key.column;
    M::pack_rows(call_.dtype, to, call_.to.batch_stride, rows, columns, scratch_.right(), to_row);
  }

  void add(const Storage* from, int64_t rows, int64_t depth, int64_t vectors, const TileSums<A>& sums) {
    Factors<A> f;
    f.pixels = kCounting.number, f.pixels_step = 1;
    f.entries = 1, f.pixel_bytes = 0, f.next_pixel = 0, f.row_bytes = sizeof(Word);
    f.steps = pieces(rows, A::kPair);
    f.right = scratch_.right(), f.right_entry = 0, f.right_step = vectors * A::kWidth;
    if constexpr (M::kInPlace) {
      f.left = reinterpret_cast<const char*>(from), f.step_bytes = call_.from.batch_stride * sizeof(Storage);
    } else {
      M::pack_rows(call_.dtype, from, call_.from.batch_stride, rows, depth, scratch_.left(), depth);
      f.left = reinterpret_cast<const char*>(scratch_.left()), f.step_bytes = depth * sizeof(Word);
    }
    tiles<A, false>(f, depth, vectors, sums, nullptr);
  }

  const ValueGradient& call_;
  Scratch<M>& scratch_;
  const int64_t part_;
  Key cached_{-1, 0, 0, 0};
};

// Compute items begin .. end - 1; an item is an entry.
template <typename M>
void value_gradient_range(const ValueGradient& call, int64_t begin, int64_t end) {
  Scratch<M> scratch = ValueGradientPanels<M>::scratch_for(call);
  ValueGradientPanels<M> panels(call, scratch);
  int64_t row = 0;
  for (int64_t entry = begin; entry < end;) {
    while (call.first[row + 1] <= entry) ++row;
    const bool adjacent = call.from.pixel_stride == call.depth;
    const int64_t entries = adjacent ? run_length(call, entry, least(end, call.first[row + 1])) : 1;
    panels.run(entry, entries, row);
    entry += entries;
  }
}

#ifdef LOCO_AVX512_BF16
const GradientKernels value_gradients{{nullptr, nullptr, value_gradient_range<Pairs<Bf16Pairs>>, nullptr}};
#else
const GradientKernels value_gradients{{value_gradient_range<Single<Lanes<double>>>,
                                       value_gradient_range<Single<Lanes<float>>>, value_gradient_range<Half>,
                                       value_gradient_range<Half>}};
#endif

LOCO_KERNELS_END
}  // namespace loco::block_sparse
