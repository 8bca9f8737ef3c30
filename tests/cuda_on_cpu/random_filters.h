// Random filters for the checks of the ring kernels: tensors, cases and thresholds. Every tensor has its own memory of
// exactly its size, so that a sanitizer sees accesses beside it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "common/dtype.h"
#include "random_checks.h"
#include "ring_prox/cuda.h"
#include "ring_prox/filter_solver.h"

namespace {

using namespace loco;
using namespace loco::ring_prox;

// A tensor [filters, channels, taps], from a random element on behind a 16-byte boundary, with nothing behind it.
class Tensor {
 public:
  // One that lies as `like` does, or flat in either order of dimensions, or in any order and with gaps.
  Tensor(Random& random, DType dtype, int64_t filters, const Shape& shape, const Tensor* like) : dtype_(dtype) {
    const int64_t sizes[] = {filters, shape.channels, shape.taps};
    int order[] = {shape.channels_fastest ? 1 : 2, shape.channels_fastest ? 2 : 1, 0};
    int64_t stride = 1;
    if (like == nullptr && chance(random, 3)) {
      for (int i = 2; i > 0; --i) std::swap(order[i], order[below(random, i + 1)]);
      stride += below(random, 2);
    }
    for (const int d : order) strides_[d] = stride, stride *= sizes[d];
    if (like != nullptr) std::copy_n(like->strides_, 3, strides_);
    int64_t elements = 1;
    for (int d = 0; d < 3; ++d) elements += (sizes[d] - 1) * strides_[d];
    const int64_t shift = chance(random, 2) ? below(random, 8) * element_size(dtype) : 0;
    memory_ = allocate(shift + elements * element_size(dtype));
    data_ = reinterpret_cast<char*>(memory_.get()) + shift;
  }

  char* at(int64_t o, int64_t c, int64_t k) const {
    return data_ + (o * strides_[0] + c * strides_[1] + k * strides_[2]) * element_size(dtype_);
  }
  DType dtype() const { return dtype_; }

  Placed placed(const Shape& shape) const {
    Placed result{data_, dtype_, strides_[0], strides_[1], {}};
    for (int k = 0; k < shape.taps; ++k) result.tap_offsets.push_back(k * strides_[2]);
    return result;
  }

 private:
  DType dtype_;
  int64_t strides_[3];
  Bytes memory_;
  char* data_;
};

struct Case {
  int64_t filters;
  std::vector<int> rings;
  Shape shape;
  DType dtype, metric_dtype;
  bool has_metric, has_squared, linf, rows;
  double size;  // of the weights
};

Case random_case(Random& random) {
  static const int64_t channels[] = {1, 1, 2, 3, 5, 8, 16, 33, 64, 100};
  static const int taps[] = {1, 2, 3, 9, 9, 15, 25};
  static const DType types[] = {DType::f32, DType::f32, DType::f64, DType::bf16, DType::f16};
  Case c;
  c.filters = 1 + below(random, 5);
  c.shape.channels = channels[below(random, 10)];
  c.shape.taps = taps[below(random, 7)];
  if (chance(random, 10)) c.shape.channels = 1300, c.shape.taps = 9, c.filters = 2;  // more than shared memory holds
  c.shape.rings = static_cast<int>(chance(random, 20) ? kMaxRings : 1 + below(random, 6));
  for (int k = 0; k < c.shape.taps; ++k) c.rings.push_back(static_cast<int>(below(random, c.shape.rings)));
  c.shape.channels_fastest = c.shape.channels > 1 && chance(random, 2);
  c.dtype = types[below(random, 5)];
  c.metric_dtype = chance(random, 2) ? c.dtype : types[below(random, 5)];
  c.has_metric = chance(random, 2);
  c.has_squared = chance(random, 3);
  c.linf = chance(random, 3);
  c.rows = chance(random, 2);
  c.size = c.dtype == DType::f64 && chance(random, 3) ? (chance(random, 2) ? 1e-200 : 1e180) : 1;
  return c;
}

// As thresholds are: of the size of the groups' norms, with zeros.
std::vector<double> thresholds(Random& random, const Case& c, double share) {
  std::vector<double> values;
  const double norm = c.size * (c.linf ? static_cast<double>(c.shape.numel()) : std::sqrt(c.shape.numel()));
  for (int64_t i = 0; i < (c.rows ? c.filters : 1) * c.shape.rings; ++i) {
    values.push_back(chance(random, 4) ? 0 : share * norm * unit(random) / c.shape.rings);
  }
  return values;
}

double spacing(DType dtype) {
  return dtype == DType::f64 ? 0x1p-52 : dtype == DType::f32 ? 0x1p-23 : dtype == DType::f16 ? 0x1p-10 : 0x1p-7;
}

template <typename T>
std::vector<T> contiguous(const Tensor& tensor, int64_t o, const Shape& shape) {
  std::vector<T> values;
  for (int64_t c = 0; c < shape.channels; ++c) {
    for (int k = 0; k < shape.taps; ++k) values.push_back(static_cast<T>(get(tensor.dtype(), tensor.at(o, c, k))));
  }
  return values;
}

// Weights of a case's size, and a metric from 0.25 to 1.25.
void fill(Random& random, const Case& c, const Tensor& u, const Tensor& d) {
  std::normal_distribution<double> normal;
  for (int64_t o = 0; o < c.filters; ++o) {
    for (int64_t i = 0; i < c.shape.numel(); ++i) {
      set(c.dtype, u.at(o, i / c.shape.taps, i % c.shape.taps), c.size * normal(random));
      set(c.metric_dtype, d.at(o, i / c.shape.taps, i % c.shape.taps), 0.25 + unit(random));
    }
  }
}

}  // namespace
