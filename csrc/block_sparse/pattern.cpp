#include "block_sparse/pattern.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

namespace loco::block_sparse {
namespace {

int64_t product(int64_t a, int64_t b) {
  int64_t result;
  if (__builtin_mul_overflow(a, b, &result)) throw std::overflow_error("more blocks or pixels than int64 can count");
  return result;
}

// Return the pixels that each output position of one axis reads, ascending, without repetition.
Pattern live_pixels(const Axis& axis) {
  Pattern live{{0}, {}};
  live.crow.reserve(axis.out + 1);
  for (int64_t o = 0; o < axis.out; ++o) {
    const int64_t* taps = axis.pixels + o * axis.taps;
    const auto first = static_cast<int64_t>(live.col.size());
    std::copy_if(taps, taps + axis.taps, std::back_inserter(live.col), [](int64_t pixel) { return pixel >= 0; });
    std::sort(live.col.begin() + first, live.col.end());
    live.col.erase(std::unique(live.col.begin() + first, live.col.end()), live.col.end());
    live.crow.push_back(static_cast<int64_t>(live.col.size()));
  }
  return live;
}

// An interval of an axis. With `ends_touch` it is the whole axis, whose last position is next to its first.
struct Span {
  int64_t first, count;
  bool ends_touch;
};

Span grown_span(int64_t low, int64_t high, int64_t size, int64_t radius, bool wraps) {
  if (wraps && (low < radius || high + radius >= size)) return {0, size, true};
  const int64_t first = std::max<int64_t>(0, low - radius);
  return {first, std::min(size - 1, high + radius) - first + 1, false};
}

// Marks the pixels of a box and dilates them by the radius, one axis after the other.
class Box {
 public:
  Box(const Sizes& image, int64_t radius, bool wraps) : image_(image), radius_(radius), wraps_(wraps) {}

  // Append the pixels that the given ones grow to, ascending.
  void grow(const int64_t* pixels, int64_t count, Indices& out) {
    enclose(pixels, count);
    for (int64_t i = 0; i < count; ++i) marks_[mark_of(pixels[i])] = 1;
    for (int axis = 0; axis < kAxes; ++axis) spread(axis);
    const auto& [z, y, x] = spans_;
    const char* mark = marks_.data();
    for (int64_t i = z.first; i < z.first + z.count; ++i) {
      for (int64_t j = y.first; j < y.first + y.count; ++j) {
        for (int64_t k = x.first; k < x.first + x.count; ++k) {
          if (*mark++) out.push_back((i * image_[1] + j) * image_[2] + k);
        }
      }
    }
  }

 private:
  Sizes position(int64_t pixel) const {
    return {pixel / image_[2] / image_[1], pixel / image_[2] % image_[1], pixel % image_[2]};
  }

  int64_t mark_of(int64_t pixel) const {
    const Sizes at = position(pixel);
    const auto& [z, y, x] = spans_;
    return ((at[0] - z.first) * y.count + at[1] - y.first) * x.count + at[2] - x.first;
  }

  void enclose(const int64_t* pixels, int64_t count) {
    Sizes low = image_, high{};
    for (int64_t i = 0; i < count; ++i) {
      const Sizes at = position(pixels[i]);
      for (int axis = 0; axis < kAxes; ++axis) {
        low[axis] = std::min(low[axis], at[axis]);
        high[axis] = std::max(high[axis], at[axis]);
      }
    }
    for (int axis = 0; axis < kAxes; ++axis) {
      spans_[axis] = grown_span(low[axis], high[axis], image_[axis], radius_, wraps_);
    }
    marks_.assign(spans_[0].count * spans_[1].count * spans_[2].count, 0);
  }

  void spread(int axis) {
    const Span& span = spans_[axis];
    int64_t stride = 1;
    for (int inner = axis + 1; inner < kAxes; ++inner) stride *= spans_[inner].count;
    const auto total = static_cast<int64_t>(marks_.size());
    for (int64_t outer = 0; outer < total; outer += stride * span.count) {
      for (int64_t line = outer; line < outer + stride; ++line) spread_line(marks_.data() + line, stride, span);
    }
  }

  // Mark a position if the last mark before it or the next one after it is at most radius_ away.
  void spread_line(char* line, int64_t stride, const Span& span) {
    near_.resize(span.count);
    int64_t ahead = radius_ + 1, behind = radius_ + 1;  // the distances to these marks
    if (span.ends_touch) {
      for (int64_t i = 0; i < span.count; ++i) behind = line[i * stride] ? 0 : behind + 1;
      for (int64_t i = span.count - 1; i >= 0; --i) ahead = line[i * stride] ? 0 : ahead + 1;
    }
    for (int64_t i = 0; i < span.count; ++i) {
      behind = line[i * stride] ? 0 : behind + 1;
      near_[i] = behind <= radius_;
    }
    for (int64_t i = span.count - 1; i >= 0; --i) {
      ahead = line[i * stride] ? 0 : ahead + 1;
      line[i * stride] = near_[i] || ahead <= radius_;
    }
  }

  const Sizes& image_;
  const int64_t radius_;
  const bool wraps_;
  std::array<Span, kAxes> spans_{};
  std::vector<char> marks_, near_;
};

}  // namespace

bool are_valid(const Rows& rows, int64_t blocks, int64_t n_in) {
  if (rows.count < 0 || rows.crow[0] != 0 || rows.crow[rows.count] != blocks) return false;
  for (int64_t row = 0; row < rows.count; ++row) {
    const int64_t begin = rows.crow[row], end = rows.crow[row + 1];
    if (begin > end || end > blocks) return false;
    bool valid = begin == end || (rows.col[begin] >= 0 && rows.col[end - 1] < n_in);
    for (int64_t block = begin + 1; block < end; ++block) valid &= rows.col[block - 1] < rows.col[block];
    if (!valid) return false;
  }
  return true;
}

Pattern conv_pattern(const Axes& axes) {
  const std::array<Pattern, kAxes> live{live_pixels(axes[0]), live_pixels(axes[1]), live_pixels(axes[2])};
  int64_t rows = 1, pixels = 1, blocks = 1;
  for (int axis = 0; axis < kAxes; ++axis) {
    rows = product(rows, axes[axis].out);
    pixels = product(pixels, axes[axis].in);
    blocks = product(blocks, static_cast<int64_t>(live[axis].col.size()));
  }

  // The pixels of a row are the Cartesian product of those of its axes and ascend as they do.
  Pattern pattern;
  pattern.crow.reserve(rows + 1);
  pattern.col.reserve(blocks);
  pattern.crow.push_back(0);
  const auto& [z, y, x] = live;
  for (int64_t o0 = 0; o0 < axes[0].out; ++o0) {
    for (int64_t o1 = 0; o1 < axes[1].out; ++o1) {
      for (int64_t o2 = 0; o2 < axes[2].out; ++o2) {
        for (int64_t i = z.crow[o0]; i < z.crow[o0 + 1]; ++i) {
          for (int64_t j = y.crow[o1]; j < y.crow[o1 + 1]; ++j) {
            const int64_t line = (z.col[i] * axes[1].in + y.col[j]) * axes[2].in;
            for (int64_t k = x.crow[o2]; k < x.crow[o2 + 1]; ++k) pattern.col.push_back(line + x.col[k]);
          }
        }
        pattern.crow.push_back(static_cast<int64_t>(pattern.col.size()));
      }
    }
  }
  return pattern;
}

Taps conv_taps(const Axes& axes, const Rows& rows) {
  const auto& [z, y, x] = axes;
  const int64_t taps = product(product(z.taps, y.taps), x.taps);
  Taps found;
  for (int64_t output = 0; output < rows.count; ++output) {
    const int64_t* first = rows.col + rows.crow[output];
    const int64_t* last = rows.col + rows.crow[output + 1];
    const int64_t* at0 = z.pixels + output / x.out / y.out * z.taps;
    const int64_t* at1 = y.pixels + output / x.out % y.out * y.taps;
    const int64_t* at2 = x.pixels + output % x.out * x.taps;
    for (int64_t tap = 0; tap < taps; ++tap) {
      const int64_t i = at0[tap / x.taps / y.taps], j = at1[tap / x.taps % y.taps], k = at2[tap % x.taps];
      if (i < 0 || j < 0 || k < 0) continue;
      const int64_t pixel = (i * y.in + j) * x.in + k;
      const int64_t* block = std::lower_bound(first, last, pixel);
      if (block == last || *block != pixel) continue;
      found.block.push_back(block - rows.col);
      found.tap.push_back(tap);
      found.output.push_back(output);
    }
  }
  return found;
}

Pattern grow(const Rows& rows, const Sizes& image, int64_t radius, bool wraps, const int64_t* seeds) {
  Box box(image, radius, wraps);
  Pattern grown{{0}, {}};
  grown.crow.reserve(rows.count + 1);
  for (int64_t row = 0; row < rows.count; ++row) {
    const int64_t count = rows.crow[row + 1] - rows.crow[row];
    box.grow(count ? rows.col + rows.crow[row] : seeds + row, count ? count : 1, grown.col);
    grown.crow.push_back(static_cast<int64_t>(grown.col.size()));
  }
  return grown;
}

Pattern unite(const Rows& a, const Rows& b) {
  Pattern both{{0}, {}};
  both.crow.reserve(a.count + 1);
  both.col.reserve(std::max(a.crow[a.count], b.crow[b.count]));
  for (int64_t row = 0; row < a.count; ++row) {
    std::set_union(a.col + a.crow[row], a.col + a.crow[row + 1], b.col + b.crow[row], b.col + b.crow[row + 1],
                   std::back_inserter(both.col));
    both.crow.push_back(static_cast<int64_t>(both.col.size()));
  }
  return both;
}

Indices locate(const Rows& part, const Rows& whole) {
  Indices found(part.crow[part.count]);
  for (int64_t row = 0; row < part.count; ++row) {
    int64_t at = whole.crow[row];
    for (int64_t block = part.crow[row]; block < part.crow[row + 1]; ++block) {
      while (whole.col[at] != part.col[block]) ++at;
      found[block] = at;
    }
  }
  return found;
}

Transposed transpose(const Rows& rows, int64_t n_in) {
  const int64_t blocks = rows.crow[rows.count];
  Transposed result{Indices(n_in + 1, 0), Indices(blocks), Indices(blocks)};
  for (int64_t block = 0; block < blocks; ++block) ++result.crow[rows.col[block] + 1];
  for (int64_t pixel = 0; pixel < n_in; ++pixel) result.crow[pixel + 1] += result.crow[pixel];
  Indices next(result.crow.begin(), result.crow.end() - 1);
  for (int64_t row = 0; row < rows.count; ++row) {
    for (int64_t block = rows.crow[row]; block < rows.crow[row + 1]; ++block) {
      const int64_t at = next[rows.col[block]]++;
      result.rows[at] = row;
      result.blocks[at] = block;
    }
  }
  return result;
}

}  // namespace loco::block_sparse
