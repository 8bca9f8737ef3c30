// The CUDA norms and prox of rings against the CPU's, both on the CPU, on random calls: argument 1 is the first seed, 2
// the number of calls. Prints a number made of all bits of the results, which must be the same in every order of blocks
// and threads.
#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#include "common/cuda_upload.h"
#include "random_filters.h"
#include "ring_prox/cuda.h"
#include "ring_prox/filter_solver.h"
#include "ring_prox/gpu_table.h"

namespace {

// Runs a call on the GPU's kernels; norms: [filters, rings].
void run(const CudaCall& call, void* norms) {
  const GpuTable table = build(call);
  const auto size = static_cast<int64_t>(table.bytes.size());
  const Bytes memory = allocate(size);
  upload(table.bytes.data(), memory.get(), size, nullptr);
  norms_cuda(call, table, memory.get(), norms, nullptr);
  prox_cuda(call, table, memory.get(), nullptr);
  if (launch_error() != nullptr) std::abort();
}

template <typename T>
bool check(Random& random, const Case& c, Digest& digest) {
  const Shape& shape = c.shape;
  const Tensor u(random, c.dtype, c.filters, shape, nullptr), out(random, c.dtype, c.filters, shape, &u);
  const Tensor d(random, c.metric_dtype, c.filters, shape, chance(random, 2) ? &u : nullptr);
  fill(random, c, u, d);
  const std::vector<double> t = thresholds(random, c, 1);
  const std::vector<double> q = c.has_squared ? thresholds(random, c, 0.3 / c.size) : std::vector<double>();
  CudaCall call{c.filters, shape, u.placed(shape), {}, out.placed(shape), t.data()};
  if (c.has_metric) call.metric = d.placed(shape);
  if (c.has_squared) call.squared = q.data();
  call.thresholds_stride = c.rows ? shape.rings : 0;
  call.thresholds_on_device = chance(random, 2);
  call.linf = c.linf;
  std::vector<T> norms(c.filters * shape.rings);
  run(call, norms.data());
  digest.add(norms.data(), static_cast<int64_t>(norms.size() * sizeof(T)));

  Shape walked = shape;
  walked.channels_fastest = false;
  FilterSolver<T> solver(walked);
  for (int64_t o = 0; o < c.filters; ++o) {
    const std::vector<T> weights = contiguous<T>(u, o, shape), metric = contiguous<T>(d, o, shape);
    std::vector<T> expected(weights.size());
    std::vector<double> expected_norms(shape.rings);
    solver.norms(weights.data(), expected_norms.data());
    for (int r = 0; r < shape.rings; ++r) {
      const double error = std::fabs(norms[o * shape.rings + r] - expected_norms[r]);
      if (!(error <= 4 * std::numeric_limits<T>::epsilon() * expected_norms[r])) return false;
    }
    const int64_t row = o * call.thresholds_stride;
    const Thresholds of{t.data() + row, c.has_squared ? q.data() + row : nullptr};
    solver.prox(weights.data(), c.has_metric ? metric.data() : nullptr, of, c.linf, expected.data());
    double largest = 0;
    for (const T weight : weights) largest = std::fmax(largest, std::fabs(weight));
    for (int64_t i = 0; i < shape.numel(); ++i) {
      const char* at = out.at(o, i / shape.taps, i % shape.taps);
      digest.add(at, element_size(c.dtype));
      const double slack = spacing(c.dtype) * std::fabs(expected[i]) + 64 * std::numeric_limits<T>::epsilon() * largest;
      if (!(std::fabs(get(c.dtype, at) - expected[i]) <= slack)) return false;
    }
  }
  return true;
}

}  // namespace

int main(int, char** arguments) {
  return check_seeds(arguments, [](Random& random, Digest& digest) {
    Case c = random_case(random);
    c.shape.ring_of_tap = c.rings.data();
    return c.dtype == DType::f64 ? check<double>(random, c, digest) : check<float>(random, c, digest);
  });
}
