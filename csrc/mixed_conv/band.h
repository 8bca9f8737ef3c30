// A band of rows of the result, and the part of the images that it is made of, copied to where vectors of pixels can be
// loaded whatever the kernels' sizes, the stride, and the width of the images.
//
// Some images lie side by side, element by element, so that vectors are full where rows are short. Columns that a
// stride does not bring together lie apart: [channel][row][column % stride][column / stride][image].
//
// What is not inlined depends on the arithmetic L: or else the linker would keep one instruction set's copy for all.
#pragma once

#include <algorithm>
#include <cstring>

#include "common/platform.h"
#include "mixed_conv/cpu.h"

namespace loco::mixed_conv {

constexpr int64_t kLine = 16;  // elements; planes an odd number of them apart use all sets of the cache

struct Layout {
  int64_t lanes;                // of a vector
  int64_t images;               // side by side
  int64_t columns;              // of the result in a vector
  int64_t vectors;              // in a row of the result
  int64_t rows, bands;          // of the result in a band, and how many there are
  int64_t top, left;            // the most that any part sees before the image
  int64_t height, width;        // of what is copied: rows, and columns that a stride brings together
  int64_t residue, row, plane;  // steps in elements

  int64_t groups(const Convolution& call) const { return (call.to.batch + images - 1) / images; }
  int64_t elements(const Convolution& call) const { return call.from.channels * plane; }
};

// As few lanes without a pixel as can be, and then as few images.
inline int64_t images_side_by_side(const Convolution& call, int64_t lanes) {
  const auto rounded = [&](int64_t images) { return (call.to.width * images + lanes - 1) / lanes * lanes; };
  int64_t best = 1;
  for (int64_t images = 2; images <= std::min(lanes, call.to.batch); images *= 2) {
    if (rounded(images) * best < rounded(best) * images) best = images;
  }
  return best;
}

// Bands of no more elements, if they have several rows, and one for each thread, if there are rows for that.
inline Layout layout_of(const Convolution& call, int64_t lanes, int64_t most_elements) {
  Layout all{};
  all.lanes = lanes;
  all.images = images_side_by_side(call, lanes);
  all.columns = lanes / all.images;
  all.vectors = (call.to.width + all.columns - 1) / all.columns;
  all.top = call.parts->top, all.left = call.parts->left;
  for (const Part* part = call.parts; part < call.parts + call.count; ++part) {
    all.top = std::max(all.top, part->top), all.left = std::max(all.left, part->left);
  }
  int64_t reach[2] = {0, 0};  // from the first row and column that any part reads at a pixel to the last
  for (const Part* part = call.parts; part < call.parts + call.count; ++part) {
    reach[0] = std::max(reach[0], all.top - part->top + (part->height - 1) * call.dilation[0]);
    reach[1] = std::max(reach[1], all.left - part->left + (part->width - 1) * call.dilation[1]);
  }
  all.width = all.vectors * all.columns + reach[1] / call.stride[1];
  all.residue = all.width * all.images;
  all.row = all.residue * call.stride[1];
  const auto height = [&](int64_t rows) { return (rows - 1) * call.stride[0] + reach[0] + 1; };
  const int64_t wanted = (call.threads + all.groups(call) - 1) / all.groups(call);
  int64_t rows = std::max<int64_t>(1, call.to.height / wanted);
  while (rows > 1 && height(rows) * all.row * call.from.channels > most_elements) --rows;
  all.bands = (call.to.height + rows - 1) / rows;
  all.rows = (call.to.height + all.bands - 1) / all.bands;
  all.height = height(all.rows);
  all.plane = ((all.height * all.row + kLine - 1) / kLine | 1) * kLine;
  return all;
}

// to[i * step] = from[i]
template <typename T>
LOCO_HD void spread(const T* from, int64_t from_step, int64_t count, T* to, int64_t to_step) {
  for (int64_t i = 0; i < count; ++i) to[i * to_step] = from[i * from_step];
}

// columns[i][j] = rows[j][i]
template <typename Four>
LOCO_HD void transpose(const Four (&rows)[4], Four (&columns)[4]) {
  for (int i = 0; i < 4; ++i) columns[i] = Four{rows[0][i], rows[1][i], rows[2][i], rows[3][i]};
}

template <typename T>
LOCO_HD void copy_whole_row(const T* from, int64_t count, T* to) {
  constexpr int64_t kAtOnce = 8;
  int64_t i = 0;
  for (; i + kAtOnce <= count; i += kAtOnce) std::memcpy(to + i, from + i, kAtOnce * sizeof(T));
  for (; i < count; ++i) to[i] = from[i];
}

// Columns first to past - 1 of a copied row of one residue are columns first * step + shift and so on of the image; the
// others are zero.
struct Span {
  int64_t shift, first, past;

  Span(const Convolution& call, const Layout& layout, int64_t residue) {
    const int64_t step = call.stride[1];
    shift = residue - layout.left;
    first = std::min(layout.width, shift >= 0 ? 0 : (-shift + step - 1) / step);
    past = std::clamp((call.from.width - shift + step - 1) / step, first, layout.width);
  }
};

template <typename T>
LOCO_HD void zero_outside(const Layout& layout, const Span& span, T* row) {
  for (int64_t i = 0; i < span.first * layout.images; ++i) row[i] = 0;
  for (int64_t i = span.past * layout.images; i < layout.residue; ++i) row[i] = 0;
}

// One row of one channel of `present` images whose columns lie side by side. In the place of images that are not there,
// anything.
template <typename L>
void copy_row(const Convolution& call, const Layout& layout, const typename L::Word* from, int64_t present,
              typename L::Word* to) {
  const int64_t step = call.stride[1], images = layout.images;
  for (int64_t residue = 0; residue < step; ++residue, to += layout.residue) {
    const Span span(call, layout, residue);
    zero_outside(layout, span, to);
    const auto* row = from + span.first * step + span.shift;
    auto* column = to + span.first * images;
    const int64_t count = span.past - span.first;
    if (images == 1 && step == 1) {
      copy_whole_row(row, count, column);
    } else {
      for (int64_t n = 0; n < images; ++n)
        spread(row + std::min(n, present - 1) * call.from.batch_stride, step, count, column + n, images);
    }
  }
}

// Images whose channels lie side by side, as they are copied: one row of one residue.
template <typename L>
struct Turn {
  using T = typename L::Word;
  static constexpr int64_t kSide = 4, kSquare = L::Square::kSize;
  typedef T Four __attribute__((vector_size(kSide * sizeof(T))));
  const Images& images;
  const Layout& layout;
  const T* from;  // of the column that place 0 is
  int64_t step, present;
  T* to;

  // Of one image's column; in the place of images that are not there, of another.
  const T* pixel(int64_t place) const {
    const int64_t image = std::min(place % layout.images, present - 1);
    return from + image * images.batch_stride + place / layout.images * step;
  }

  // All channels from `channel` on of four pixels.
  void four_pixels(int64_t place, int64_t channel) const {
    const T* const pixels[kSide] = {pixel(place), pixel(place + 1), pixel(place + 2), pixel(place + 3)};
    T* lane = to + place;
    for (; channel + kSide <= images.channels; channel += kSide) {
      Four rows[kSide], columns[kSide];
      for (int i = 0; i < kSide; ++i) std::memcpy(&rows[i], pixels[i] + channel, sizeof(Four));
      transpose(rows, columns);
      for (int i = 0; i < kSide; ++i) std::memcpy(lane + (channel + i) * layout.plane, &columns[i], sizeof(Four));
    }
    for (; channel < images.channels; ++channel) {
      for (int i = 0; i < kSide; ++i) lane[channel * layout.plane + i] = pixels[i][channel];
    }
  }

  void pixels(int64_t place, int64_t past) const {
    const int64_t row_bytes = step * static_cast<int64_t>(sizeof(T));
    for (; layout.images == 1 && place + kSquare <= past; place += kSquare) {
      int64_t channel = 0;
      for (; channel + kSquare <= images.channels; channel += kSquare) {
        const auto* square = reinterpret_cast<const char*>(from + place * step + channel);
        L::Square::template transpose<T>(square, row_bytes, to + channel * layout.plane + place, layout.plane);
      }
      for (int64_t next = place; next < place + kSquare; next += kSide) four_pixels(next, channel);
    }
    for (; place + kSide <= past; place += kSide) four_pixels(place, 0);
    for (; place < past; ++place) spread(pixel(place), 1, images.channels, to + place, layout.plane);
  }
};

template <typename L>
void turn_row(const Convolution& call, const Layout& layout, const typename L::Word* from, int64_t present,
              typename L::Word* to) {
  const Images& images = call.from;
  for (int64_t residue = 0; residue < call.stride[1]; ++residue, to += layout.residue) {
    const Span span(call, layout, residue);
    for (int64_t c = 0; c < images.channels; ++c) zero_outside(layout, span, to + c * layout.plane);
    const Turn<L> turn{images,  layout, from + span.shift * images.column_stride, call.stride[1] * images.column_stride,
                       present, to};
    turn.pixels(span.first * layout.images, span.past * layout.images);
  }
}

// What the rows of the result from `first_row` on are made of.
template <typename L>
void copy_band(const Convolution& call, const Layout& layout, int64_t first_image, int64_t first_row,
               typename L::Word* to) {
  using T = typename L::Word;
  const Images& images = call.from;
  const int64_t present = std::min(layout.images, images.batch - first_image);
  const T* from = static_cast<const T*>(images.data) + first_image * images.batch_stride;
  for (int64_t r = 0; r < layout.height; ++r, to += layout.row) {
    const int64_t y = first_row * call.stride[0] - layout.top + r;
    const T* row = from + y * images.row_stride;
    const bool outside = y < 0 || y >= images.height;
    if (!outside && images.by_pixel()) {
      turn_row<L>(call, layout, row, present, to);
      continue;
    }
    for (int64_t c = 0; c < images.channels; ++c) {
      T* line = to + c * layout.plane;
      if (outside) {
        std::memset(line, 0, layout.row * sizeof(T));
      } else {
        copy_row<L>(call, layout, row + c * images.channel_stride, present, line);
      }
    }
  }
}

}  // namespace loco::mixed_conv
