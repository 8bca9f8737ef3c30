// The prox of several layers with joint penalties against one found by bisection, and against that of each layer alone,
// on random calls: argument 1 is the first seed, 2 the number of calls. Prints a number made of all bits of the
// results, which must be the same in every order of blocks and threads.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <vector>

#include "common/cuda_upload.h"
#include "random_filters.h"
#include "ring_prox/cuda.h"
#include "ring_prox/filter_solver.h"
#include "ring_prox/gpu_table.h"

namespace {

constexpr int64_t kNone = -1;

struct Layer {
  Case c;
  Tensor u, d, out, alone;
  int64_t spoilt = kNone;  // the filter with a NaN or an infinite weight, for which only the others are compared
  std::vector<double> t, q;

  Layer(Random& random, const Case& of_layer)
      : c(of_layer),
        u(random, c.dtype, c.filters, c.shape, nullptr),
        d(random, c.metric_dtype, c.filters, c.shape, chance(random, 2) ? &u : nullptr),
        out(random, c.dtype, c.filters, c.shape, &u),
        alone(random, c.dtype, c.filters, c.shape, nullptr),
        t(thresholds(random, c, chance(random, 2) ? 0 : 0.5)),
        q(thresholds(random, c, (chance(random, 4) ? 30 : 0.3) / c.size)) {
    fill(random, c, u, d);
    if (!chance(random, 5)) return;
    spoilt = below(random, c.filters);
    const double value = chance(random, 2) ? std::nan("") : std::numeric_limits<double>::infinity();
    set(c.dtype, u.at(spoilt, below(random, c.shape.channels), below(random, c.shape.taps)), value);
  }

  CudaCall call(const Tensor& to) {
    c.shape.ring_of_tap = c.rings.data();
    CudaCall call{c.filters, c.shape, u.placed(c.shape), {}, to.placed(c.shape), t.data(), q.data()};
    if (c.has_metric) call.metric = d.placed(c.shape);
    call.thresholds_stride = c.rows ? c.shape.rings : 0;
    call.thresholds_on_device = c.filters % 2;
    call.linf = c.linf;
    return call;
  }
};

void run(const std::vector<CudaCall>& calls) {
  const JointTable table = build_joint(calls);
  const auto size = static_cast<int64_t>(table.bytes.size());
  const Bytes memory = allocate(table.memory);
  std::memset(memory.get() + size, 0xff, table.memory - size);  // sums that nobody writes are NaN
  upload(table.bytes.data(), memory.get(), size, nullptr);
  joint_prox_cuda(calls, table, memory.get(), nullptr);
  if (launch_error() != nullptr) std::abort();
}

// The layer's prox in float64 as a function of the factor, by the filters' own solver.
template <typename T>
class Reference {
 public:
  explicit Reference(const Layer& layer) : layer_(layer), shape_(layer.c.shape), solver_(walked(shape_)) {
    for (int64_t o = 0; o < layer.c.filters; ++o) {
      const std::vector<T> u = contiguous<T>(layer.u, o, shape_), d = contiguous<T>(layer.d, o, shape_);
      weights_.emplace_back(u.begin(), u.end());
      metrics_.emplace_back(d.begin(), d.end());
      if (o == layer.spoilt) continue;
      for (const double weight : weights_.back()) largest_ = std::fmax(largest_, std::fabs(weight));
    }
  }

  double largest() const { return largest_; }

  std::vector<double> filter(int64_t o, double factor) {
    const int64_t row = layer_.c.rows ? o * shape_.rings : 0;
    std::vector<double> t(shape_.rings), x(shape_.numel());
    for (int n = 0; n < shape_.rings; ++n) t[n] = layer_.t[row + n] + factor * layer_.q[row + n];
    const double* metric = layer_.c.has_metric ? metrics_[o].data() : nullptr;
    solver_.prox(weights_[o].data(), metric, {t.data(), nullptr}, layer_.c.linf, x.data());
    return x;
  }

  // Return the root of f - 2 S(f) by bisection, where S is the layer's sum.
  double factor() {
    double lower = 0, upper = 2 * sum(0);
    for (;;) {
      const double middle = lower + (upper - lower) / 2;
      if (!(lower < middle && middle < upper)) return upper;
      (middle < 2 * sum(middle) ? lower : upper) = middle;
    }
  }

 private:
  static Shape walked(Shape shape) {
    shape.channels_fastest = false;
    return shape;
  }

  double sum(double factor) {
    double total = 0;
    for (int64_t o = 0; o < layer_.c.filters; ++o) {
      const double of_filter = sum_of(filter(o, factor), layer_.c.rows ? o * shape_.rings : 0);
      if (std::isfinite(of_filter)) total += of_filter;
    }
    return total;
  }

  // Return sum_n q_n ||x(G_n)||. row: of the filter's q.
  double sum_of(const std::vector<double>& x, int64_t row) const {
    const bool linf = layer_.c.linf;
    const auto joined = [linf](double a, double b) { return !linf ? a + b : a >= b || a != a ? a : b; };
    std::vector<double> of_rings(shape_.rings);  // the largest weight, or the sum of squares; NaN if there is one
    for (int64_t i = 0; i < shape_.numel(); ++i) {
      const double size = std::fabs(x[i]) / layer_.c.size;
      double& of_ring = of_rings[layer_.c.rings[i % shape_.taps]];
      of_ring = joined(of_ring, linf ? size : size * size);
    }
    double total = 0, of_group = 0;
    for (int n = 0; n < shape_.rings; ++n) {
      of_group = joined(of_group, of_rings[n]);
      const double q = layer_.q[row + n];
      if (q > 0) total += q * layer_.c.size * (linf ? of_group : std::sqrt(of_group));
    }
    return total;
  }

  const Layer& layer_;
  Shape shape_;
  FilterSolver<double> solver_;
  std::vector<std::vector<double>> weights_, metrics_;
  double largest_ = 0;
};

template <typename T>
bool check(const Layer& layer, Digest& digest) {
  const Case& c = layer.c;
  Reference<T> reference(layer);
  const double factor = reference.factor();
  const double slack = 512 * std::numeric_limits<T>::epsilon() * reference.largest();
  for (int64_t o = 0; o < c.filters; ++o) {
    const std::vector<double> expected = o == layer.spoilt ? std::vector<double>() : reference.filter(o, factor);
    for (int64_t i = 0; i < c.shape.numel(); ++i) {
      const char* at = layer.out.at(o, i / c.shape.taps, i % c.shape.taps);
      const char* alone = layer.alone.at(o, i / c.shape.taps, i % c.shape.taps);
      digest.add(at, element_size(c.dtype));
      if (std::memcmp(at, alone, element_size(c.dtype)) != 0) return false;
      if (o == layer.spoilt) continue;
      if (!(std::fabs(get(c.dtype, at) - expected[i]) <= spacing(c.dtype) * std::fabs(expected[i]) + slack))
        return false;
    }
  }
  return true;
}

// Some layers have many filters, some fill several warps, and some do not fit into shared memory.
Case random_layer(Random& random) {
  Case c = random_case(random);
  if (c.shape.numel() > 500 && !chance(random, 8))
    c.shape.channels = 1 + (chance(random, 4) ? 1100 : 300) / c.shape.taps;
  if (c.shape.numel() * c.shape.rings < 200 && chance(random, 2)) c.filters = 33 + below(random, 8);
  return c;
}

bool check_layers(Random& random, Digest& digest) {
  std::deque<Layer> layers;
  const int64_t count = chance(random, 10) ? 30 : 1 + below(random, 4);  // more than one launch takes
  const bool linf = chance(random, 3), has_metric = chance(random, 2);
  for (int64_t i = 0; i < count; ++i) {
    Case c = random_layer(random);
    if (count > 5) c.shape.channels = 1, c.shape.channels_fastest = false, c.filters = 1 + below(random, 3);
    c.linf = linf, c.has_metric = has_metric;
    layers.emplace_back(random, c);
  }
  std::vector<CudaCall> calls;
  for (Layer& layer : layers) calls.push_back(layer.call(layer.out));
  run(calls);
  for (Layer& layer : layers) {
    run({layer.call(layer.alone)});
    if (!(layer.c.dtype == DType::f64 ? check<double>(layer, digest) : check<float>(layer, digest))) return false;
  }
  return true;
}

}  // namespace

int main(int, char** arguments) { return check_seeds(arguments, check_layers); }
