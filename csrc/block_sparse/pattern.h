// Patterns of live (output pixel, input pixel) pairs, built on the host. No torch, no values: indices alone.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace loco::block_sparse {

using Indices = std::vector<int64_t>;

// Image and kernel axes, outermost first; images of fewer axes have leading ones of size 1.
constexpr int kAxes = 3;
using Sizes = std::array<int64_t, kAxes>;

// A pattern held elsewhere: row o, an output pixel, has the input pixels col[crow[o]] ... col[crow[o + 1] - 1],
// strictly ascending.
struct Rows {
  const int64_t *crow, *col;
  int64_t count;
};

// Whether `rows` begin at 0, do not descend and end at `blocks`, and have ascending pixels from 0 to below `n_in`.
bool are_valid(const Rows& rows, int64_t blocks, int64_t n_in);

struct Pattern {
  Indices crow, col;
};

// What a convolution reads along one axis: the input pixel at pixels[o * taps + t], or -1 in the padding.
struct Axis {
  const int64_t* pixels;
  int64_t out, taps, in;
};
using Axes = std::array<Axis, kAxes>;

// The pairs of a convolution. Throws std::overflow_error where int64 cannot count the pairs or the pixels.
Pattern conv_pattern(const Axes& axes);

// Where a convolution's taps are in a pattern: one entry for each tap of each output pixel that reads a pixel whose
// block is in the pattern, in this order.
struct Taps {
  Indices block, tap, output;
};
Taps conv_taps(const Axes& axes, const Rows& rows);

// Every row's pixels and those at most `radius` away from one of them along every axis, on an image whose opposite ends
// touch if it wraps. An empty row grows from its seed, an input pixel.
Pattern grow(const Rows& rows, const Sizes& image, int64_t radius, bool wraps, const int64_t* seeds);

// The blocks of either pattern; they have as many rows.
Pattern unite(const Rows& a, const Rows& b);

// The index in `whole` of every block of `part`; all of them have to be there.
Indices locate(const Rows& part, const Rows& whole);

// By input pixel: its output pixels, ascending, and the blocks' indices in `rows`.
struct Transposed {
  Indices crow, rows, blocks;
};
Transposed transpose(const Rows& rows, int64_t n_in);

}  // namespace loco::block_sparse
