// Patterns of live (output pixel, input pixel) pairs, built on the host. Without torch and without values: indices
// only.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace loco::block_sparse {

using Indices = std::vector<int64_t>;

// Image axes and filter axes, outermost first. Images of fewer axes have leading axes of size 1.
constexpr int kAxes = 3;
using Sizes = std::array<int64_t, kAxes>;

// A non-owning view of a pattern in CSR form. Row o, an output pixel, has the input pixels col[crow[o]] ... col[crow[o
// + 1] - 1], strictly ascending. crow is [count + 1].
struct Rows {
  const int64_t *crow, *col;
  int64_t count;
};

// Return whether crow begins at 0, never descends and ends at `blocks`, and the pixels of each row ascend strictly
// within [0, n_in).
bool are_valid(const Rows& rows, int64_t blocks, int64_t n_in);

struct Pattern {
  Indices crow, col;
};

// The input pixels that a convolution reads along one axis: pixels[o * taps + t] for output o and tap t, or -1 in the
// padding.
struct Axis {
  const int64_t* pixels;
  int64_t out, taps, in;
};
using Axes = std::array<Axis, kAxes>;

// Return the pairs of a convolution. Throws std::overflow_error if int64 cannot count the pairs or the pixels.
Pattern conv_pattern(const Axes& axes);

// The taps of a convolution that a pattern contains: one entry for each output pixel and tap that reads a pixel whose
// block is in the pattern, ordered by output pixel, then tap.
struct Taps {
  Indices block, tap, output;
};
Taps conv_taps(const Axes& axes, const Rows& rows);

// Return each row's pixels and those at most `radius` away from one of them along every axis. If `wraps`, opposite ends
// of the image touch. An empty row grows from its seed, an input pixel; seeds is [rows].
Pattern grow(const Rows& rows, const Sizes& image, int64_t radius, bool wraps, const int64_t* seeds);

// Return the union of two patterns with the same number of rows.
Pattern unite(const Rows& a, const Rows& b);

// Return the index in `whole` of every block of `part`, all of which must exist there.
Indices locate(const Rows& part, const Rows& whole);

// The transposed pattern: for each input pixel its output pixels, ascending, and the blocks' indices in the original.
struct Transposed {
  Indices crow, rows, blocks;
};
Transposed transpose(const Rows& rows, int64_t n_in);

}  // namespace loco::block_sparse
