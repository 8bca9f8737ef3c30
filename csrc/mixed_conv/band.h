// Layout of a band: some rows of the result, for which the part of the images that they depend on is copied (copy.h) so
// that vectors of pixels can be loaded whatever the filters' sizes, the stride, and the width of the images.
//
// Several images are interleaved element by element so that vectors are full even if rows are short. Columns that
// differ modulo the stride are stored apart: [channel, row, column % stride, column / stride, image].
#pragma once

#include <algorithm>

#include "mixed_conv/cpu.h"

namespace loco::mixed_conv {
LOCO_KERNELS_BEGIN

constexpr int64_t kLine = 16;  // elements of a cache line; planes an odd number of lines apart use all cache sets

struct BandLayout {
  int64_t lanes;                // in a vector
  int64_t images;               // interleaved images, a power of two
  int64_t columns;              // columns of the result in a vector
  int64_t vectors;              // vectors in a row of the result
  int64_t rows, bands;          // rows of the result in a band, and the number of bands
  int64_t top, left;            // the largest padding of any part before the image
  int64_t height, width;        // size of the copy: rows, and columns of one residue of the stride
  int64_t residue, row, plane;  // strides of the copy in elements

  int64_t groups(const Convolution& call) const { return (call.to.batch + images - 1) / images; }
  int64_t elements(const Convolution& call) const { return call.from.channels * plane; }
};

// Return the number of images to interleave that leaves the fewest lanes empty, and the smallest such number.
inline int64_t images_side_by_side(const Convolution& call, int64_t lanes) {
  const auto rounded = [&](int64_t images) { return (call.to.width * images + lanes - 1) / lanes * lanes; };
  int64_t best = 1;
  for (int64_t images = 2; images <= std::min(lanes, call.to.batch); images *= 2) {
    if (rounded(images) * best < rounded(best) * images) best = images;
  }
  return best;
}

// Return a layout whose bands have at most most_elements elements, unless a band of one row has more, and with at least
// one band for each thread if there are enough rows.
inline BandLayout layout_of(const Convolution& call, int64_t lanes, int64_t most_elements) {
  BandLayout all{};
  all.lanes = lanes;
  all.images = images_side_by_side(call, lanes);
  all.columns = lanes / all.images;
  all.vectors = (call.to.width + all.columns - 1) / all.columns;
  all.top = call.parts->top, all.left = call.parts->left;
  for (const Part* part = call.parts; part < call.parts + call.count; ++part) {
    all.top = std::max(all.top, part->top), all.left = std::max(all.left, part->left);
  }
  int64_t reach[2] = {0, 0};  // rows and columns from the first that any part reads for a pixel to the last
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

LOCO_KERNELS_END
}  // namespace loco::mixed_conv
