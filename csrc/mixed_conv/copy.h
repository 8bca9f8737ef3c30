// Copying the pixels that a band depends on, as its BandLayout describes.
//
//   to[channel, row, column % stride, column / stride, image]
//       = from[first_image + image, channel, first_row * stride + row - top, column - left]
//
// with zeros outside the images. from has the strides of Images (cpu.h): either columns (Weave) or channels
// (TransposeRows) are contiguous. to has the strides of BandLayout (band.h). One thread copies a band, row by row: for
// each residue of the column stride, vectors of four elements are loaded and transposed where images or channels have
// to be interleaved.
#pragma once

#include <cstring>

#include "mixed_conv/band.h"

namespace loco::mixed_conv {
LOCO_KERNELS_BEGIN

constexpr int64_t kSide = 4;

template <typename T>
struct FourOf {
  typedef T type __attribute__((vector_size(kSide * sizeof(T))));
};

template <typename T>
using Four = typename FourOf<T>::type;

template <typename T>
LOCO_HD Four<T> load_four(const T* from) {
  Four<T> four;
  std::memcpy(&four, from, sizeof four);
  return four;
}

// Load elements 0, step, 2 * step and 3 * step.
template <typename T>
LOCO_HD Four<T> load_four(const T* from, int64_t step) {
  if (step == 1) return load_four(from);
  if (step > 2) return Four<T>{from[0], from[step], from[2 * step], from[3 * step]};
  const Four<T> low = load_four(from), high = load_four(from + 3);  // reads nothing beyond the last element
  return Four<T>{low[0], low[2], high[1], high[3]};
}

template <typename T>
LOCO_HD void store_four(const Four<T>& four, T* to) {
  std::memcpy(to, &four, sizeof four);
}

// Write columns[i][j] = rows[j][i].
template <typename Vec>
LOCO_HD void transpose(const Vec (&rows)[kSide], Vec (&columns)[kSide]) {
  for (int i = 0; i < kSide; ++i) columns[i] = Vec{rows[0][i], rows[1][i], rows[2][i], rows[3][i]};
}

// Write to[i * to_step] = from[i * from_step].
template <typename T>
LOCO_HD void spread(const T* from, int64_t from_step, int64_t count, T* to, int64_t to_step) {
  for (int64_t i = 0; i < count; ++i) to[i * to_step] = from[i * from_step];
}

// The columns of the images that are copied, for one residue of the stride: column shift + place * step goes to
// `place`, for places first .. past - 1. The other places are zero.
struct ColumnMap {
  int64_t step, shift, first, past;

  LOCO_HD ColumnMap(const Convolution& call, const BandLayout& layout, int64_t residue)
      : step(call.stride[1]), shift(residue - layout.left) {
    first = std::min(layout.width, shift >= 0 ? 0 : (-shift + step - 1) / step);
    past = std::clamp((call.from.width - shift + step - 1) / step, first, layout.width);
  }
};

// Copies rows of images in which columns are contiguous. Images beyond the batch are replaced by the last one.
template <typename L>
struct Weave {
  using T = typename L::Word;
  const ColumnMap& span;
  int64_t images, present, batch_stride;

  void row(const T* from, T* to) const {
    const int64_t step = span.step, count = span.past - span.first;
    from += span.first * step + span.shift;
    to += span.first * images;
    if (images == 1 && step == 1) return spread(from, 1, count, to, 1);
    int64_t i = 0;
    for (; i + kSide <= count && images != 2; i += kSide) four_columns(from + i * step, to + i * images);
    for (; i < count; ++i) {
      for (int64_t n = 0; n < images; ++n) to[i * images + n] = image(from, n)[i * step];
    }
  }

  LOCO_HD void four_columns(const T* from, T* to) const {
    const int64_t step = span.step;
    if (images == 1) return store_four(load_four(from, step), to);
    for (int64_t n = 0; n < images; n += kSide) {
      Four<T> rows[kSide], columns[kSide];
      for (int i = 0; i < kSide; ++i) rows[i] = load_four(image(from, n + i), step);
      transpose(rows, columns);
      for (int i = 0; i < kSide; ++i) store_four(columns[i], to + i * images + n);
    }
  }

  LOCO_HD const T* image(const T* from, int64_t n) const { return from + std::min(n, present - 1) * batch_stride; }
};

// Copies rows of images in which channels are contiguous, to the same layout as Weave.
template <typename L>
struct TransposeRows {
  using T = typename L::Word;
  const ColumnMap& span;
  int64_t images, present, batch_stride, column_stride, channels, plane;

  void row(const T* from, T* to) const {
    from += span.shift * column_stride;
    int64_t place = span.first * images;
    const int64_t past = span.past * images;
    for (; place + kSide <= past; place += kSide) four_pixels(from, place, to);
    for (; place < past; ++place) spread(pixel(from, place), 1, channels, to + place, plane);
  }

  LOCO_HD void four_pixels(const T* from, int64_t place, T* to) const {
    const T* pixels[kSide];
    for (int i = 0; i < kSide; ++i) pixels[i] = pixel(from, place + i);
    T* lanes = to + place;
    int64_t channel = 0;
    for (; channel + kSide <= channels; channel += kSide) {
      Four<T> rows[kSide], columns[kSide];
      for (int i = 0; i < kSide; ++i) rows[i] = load_four(pixels[i] + channel);
      transpose(rows, columns);
      for (int i = 0; i < kSide; ++i, lanes += plane) store_four(columns[i], lanes);
    }
    for (; channel < channels; ++channel, lanes += plane)
      store_four(Four<T>{pixels[0][channel], pixels[1][channel], pixels[2][channel], pixels[3][channel]}, lanes);
  }

  LOCO_HD const T* pixel(const T* from, int64_t place) const {
    const int64_t image = std::min(place & (images - 1), present - 1);
    return from + image * batch_stride + (place >> __builtin_ctzll(images)) * span.step * column_stride;
  }
};

// Copy what the rows of the result from `first_row` on depend on. Columns outside the images must be zero already.
template <typename L>
void copy_band(const Convolution& call, const BandLayout& layout, int64_t first_image, int64_t first_row,
               typename L::Word* to) {
  using T = typename L::Word;
  const Images& images = call.from;
  const int64_t present = std::min(layout.images, images.batch - first_image);
  const int64_t top = first_row * call.stride[0] - layout.top;  // the band's first row of the images
  const int64_t first = std::clamp<int64_t>(-top, 0, layout.height);
  const int64_t past = std::clamp(images.height - top, first, layout.height);
  for (int64_t c = 0; c < images.channels; ++c) {
    T* plane = to + c * layout.plane;
    std::memset(plane, 0, first * layout.row * sizeof(T));
    std::memset(plane + past * layout.row, 0, (layout.height - past) * layout.row * sizeof(T));
  }
  const T* from = static_cast<const T*>(images.data) + first_image * images.batch_stride + top * images.row_stride;
  for (int64_t residue = 0; residue < call.stride[1]; ++residue, to += layout.residue) {
    const ColumnMap span(call, layout, residue);
    const Weave<L> weave{span, layout.images, present, images.batch_stride};
    const TransposeRows<L> transposed{
        span, layout.images, present, images.batch_stride, images.column_stride, images.channels, layout.plane};
    if (images.by_pixel()) {
      for (int64_t r = first; r < past; ++r) transposed.row(from + r * images.row_stride, to + r * layout.row);
      continue;
    }
    for (int64_t c = 0; c < images.channels; ++c) {
      const T* channel = from + c * images.channel_stride;
      T* plane = to + c * layout.plane;
      for (int64_t r = first; r < past; ++r) weave.row(channel + r * images.row_stride, plane + r * layout.row);
    }
  }
}

LOCO_KERNELS_END
}  // namespace loco::mixed_conv
