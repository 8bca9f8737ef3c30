// A band of rows of the result, and the part of the images that it is made of, copied to where vectors of pixels can be
// loaded whatever the kernels' sizes, the stride, and the width of the images.
//
// Some images lie side by side, element by element, so that vectors are full where rows are short. Columns that a
// stride does not bring together lie apart: [channel][row][column % stride][column / stride][image].
#pragma once

#include <algorithm>
#include <cstring>

#include "mixed_conv/cpu.h"

namespace loco::mixed_conv {

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
  all.plane = all.height * all.row;
  return all;
}

// to[i * step] = from[i]
template <typename T>
void spread(const T* from, int64_t from_step, int64_t count, T* to, int64_t to_step) {
  for (int64_t i = 0; i < count; ++i) to[i * to_step] = from[i * from_step];
}

template <typename T>
void copy_whole_row(const T* from, int64_t count, T* to) {
  constexpr int64_t kAtOnce = 8;
  int64_t i = 0;
  for (; i + kAtOnce <= count; i += kAtOnce) std::memcpy(to + i, from + i, kAtOnce * sizeof(T));
  for (; i < count; ++i) to[i] = from[i];
}

// One row of one channel of some images; those that are not there, and columns outside, are zero.
template <typename T>
void copy_row(const Convolution& call, const Layout& layout, const T* from, int64_t present, T* to) {
  const int64_t step = call.stride[1], images = layout.images;
  for (int64_t residue = 0; residue < step; ++residue, to += layout.residue) {
    // Column c of the copy is column c * step + shift of the image.
    const int64_t shift = residue - layout.left;
    const int64_t first = std::min(layout.width, shift >= 0 ? 0 : (-shift + step - 1) / step);
    const int64_t past = std::clamp((call.from.width - shift + step - 1) / step, first, layout.width);
    for (int64_t i = 0; i < first * images; ++i) to[i] = 0;
    for (int64_t i = past * images; i < layout.residue; ++i) to[i] = 0;
    const T* row = from + first * step + shift;
    T* column = to + first * images;
    if (images == 1 && step == 1) {
      copy_whole_row(row, past - first, column);
      continue;
    }
    for (int64_t n = 0; n < images; ++n, row += call.from.batch_stride) {
      const T zero = 0;
      spread(n < present ? row : &zero, n < present ? step : 0, past - first, column + n, images);
    }
  }
}

// What the rows of the result from `first_row` on are made of.
template <typename T>
void copy_band(const Convolution& call, const Layout& layout, int64_t first_image, int64_t first_row, T* to) {
  const Images& images = call.from;
  const int64_t present = std::min(layout.images, images.batch - first_image);
  const T* from = static_cast<const T*>(images.data) + first_image * images.batch_stride;
  for (int64_t c = 0; c < images.channels; ++c, from += images.channel_stride) {
    for (int64_t r = 0; r < layout.height; ++r, to += layout.row) {
      const int64_t y = first_row * call.stride[0] - layout.top + r;
      if (y < 0 || y >= images.height) {
        std::memset(to, 0, layout.row * sizeof(T));
      } else {
        copy_row(call, layout, from + y * images.row_stride, present, to);
      }
    }
  }
}

}  // namespace loco::mixed_conv
