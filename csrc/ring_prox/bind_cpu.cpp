// torch.ops.loco_ext.ring_norms and ring_prox on CPU tensors.
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "common/convert.h"
#include "common/stable.h"
#include "common/strided.h"
#include "ring_prox/cpu.h"
#include "ring_prox/math.h"
#include "ring_prox/penalty.h"

namespace loco::ring_prox {
namespace {

using Ints = std::vector<int64_t>;

// A weight's shape as its kernels see it: (kernels, channels, *taps).
struct Reader {
  View view;
  std::vector<int> ring_of_tap;
  Shape shape;

  Reader(const Tensor& weight, const Ints& rings, int64_t count) : view(view_of(weight, "weight", 0)) {
    STD_TORCH_CHECK(view.ndim >= 2 && view.ndim < kMaxDims, "weight: expected 2 to ", kMaxDims - 1,
                    " dimensions, got shape ", shape_text(view.sizes, view.ndim));
    STD_TORCH_CHECK(count >= 1 && count <= kMaxRings, "rings: expected 1 to ", kMaxRings, " of them, got ", count);
    int64_t taps = 1;
    for (int64_t k = 2; k < view.ndim; ++k) taps *= view.sizes[k];
    STD_TORCH_CHECK(taps == static_cast<int64_t>(rings.size()), "rings: expected one entry for each of the ", taps,
                    " taps of weight, got ", rings.size());
    STD_TORCH_CHECK(view.sizes[1] > 0 && taps > 0, "weight: expected kernels of at least one weight, got shape ",
                    shape_text(view.sizes, view.ndim));
    for (const int64_t ring : rings) {
      STD_TORCH_CHECK(ring >= 0 && ring < count, "rings: expected entries from 0 to ", count - 1, ", got ", ring);
      ring_of_tap.push_back(static_cast<int>(ring));
    }
    shape = {view.sizes[1], static_cast<int>(taps), static_cast<int>(count), ring_of_tap.data(), false};
  }

  int64_t kernel_count() const { return view.sizes[0]; }

  // Whether a kernel's channels lie side by side and its taps do not.
  bool lies_channels_last() const { return shape.channels > 1 && view.strides[1] == 1; }

  // nest is where the kernels' own is kept.
  Kernels kernels(const View& tensor, Nest& nest) const {
    int8_t order[kMaxDims];
    int axes = 0;
    if (shape.channels_fastest) order[axes++] = 1;
    for (int64_t d = tensor.ndim - 1; d >= 2; --d) order[axes++] = static_cast<int8_t>(d);
    if (!shape.channels_fastest) order[axes++] = 1;
    const auto one = [&](int k) { return tensor.sizes[order[k]] == 1; };
    int used = 0;
    for (int k = 0; k < axes; ++k) {
      if (!one(k)) order[used++] = order[k];
    }
    STD_TORCH_CHECK(make_nest(order, used, tensor.sizes, tensor.strides, nest), "weight: expected at most ", kMaxAxes,
                    " strides that differ");
    return {{tensor.data, tensor.dtype, nest.flat() ? nullptr : &nest}, tensor.strides[0]};
  }
};

Tensor ring_norms(Tensor weight, Ints rings, int64_t count) {
  Reader reader(weight, rings, count);
  reader.shape.channels_fastest = reader.lies_channels_last();
  const bool is_double = reader.view.dtype == DType::f64;
  const auto dtype = is_double ? torch::headeronly::ScalarType::Double : torch::headeronly::ScalarType::Float;
  const std::array<int64_t, 2> sizes{reader.kernel_count(), count};
  Tensor out = torch::stable::new_empty(weight, sizes, dtype);
  std::vector<double> norms(reader.kernel_count() * count);
  Nest nest;
  const NormsCall call{reader.kernel_count(), reader.shape, reader.kernels(reader.view, nest), norms.data(),
                       parallel_for};
  is_double ? norms_cpu<double>(call) : norms_cpu<float>(call);
  const View to = view_of(out, "out", 0);
  store(to.dtype, norms.data(), to.data, to.numel);
  return out;
}

int64_t ring_penalty_hold(Ints rings, Tensor thresholds, std::optional<Tensor> squared, bool linf) {
  const auto read = [](const Tensor& tensor, const char* name) {
    const View view = view_of(tensor, name, 0);
    STD_TORCH_CHECK(view.dtype == DType::f64 && view.ndim == 1 && view.numel >= 1 && view.numel <= kMaxRings &&
                        tensor.is_contiguous(),
                    name, ": expected a contiguous float64 tensor of 1 to ", kMaxRings, " numbers");
    const auto* values = static_cast<const double*>(view.data);
    return std::vector<double>(values, values + view.numel);
  };
  auto penalty = std::make_shared<Penalty>();
  penalty->plain = read(thresholds, "thresholds");
  if (squared) penalty->squared = read(*squared, "squared");
  STD_TORCH_CHECK(!squared || penalty->squared.size() == penalty->plain.size(), "squared: expected ",
                  penalty->plain.size(), " numbers, got ", penalty->squared.size());
  for (const int64_t ring : rings) {
    STD_TORCH_CHECK(ring >= 0 && ring < penalty->rings(), "rings: expected entries from 0 to ", penalty->rings() - 1,
                    ", got ", ring);
    penalty->ring_of_tap.push_back(static_cast<int>(ring));
  }
  penalty->linf = linf;
  return keep(std::move(penalty));
}

bool same_shape(const View& a, const View& b) {
  if (a.ndim != b.ndim) return false;
  for (int64_t d = 0; d < a.ndim; ++d) {
    if (a.sizes[d] != b.sizes[d]) return false;
  }
  return true;
}

Tensor ring_prox(Tensor weight, Ints rings, Tensor thresholds, std::optional<Tensor> squared,
                 std::optional<Tensor> metric, bool linf) {
  const View t = view_of(thresholds, "thresholds", 0);
  STD_TORCH_CHECK(t.dtype == DType::f64 && (t.ndim == 1 || t.ndim == 2) && thresholds.is_contiguous(),
                  "thresholds: expected a contiguous float64 tensor of 1 or 2 dimensions");
  const int64_t count = t.sizes[t.ndim - 1];
  Reader reader(weight, rings, count);
  const Shape& shape = reader.shape;
  STD_TORCH_CHECK(t.ndim == 1 || t.sizes[0] == reader.kernel_count(), "thresholds: expected ", reader.kernel_count(),
                  " rows, got ", t.sizes[0]);
  const double* q = nullptr;
  if (squared) {
    const View view = view_of(*squared, "squared", 0);
    STD_TORCH_CHECK(view.dtype == DType::f64 && same_shape(view, t) && squared->is_contiguous(),
                    "squared: expected a contiguous float64 tensor of the thresholds' shape");
    q = static_cast<const double*>(view.data);
  }
  reader.shape.channels_fastest = reader.lies_channels_last();
  Tensor out = torch::stable::empty_like(weight);
  Nest nests[3];
  ProxCall call{reader.kernel_count(),
                shape,
                reader.kernels(reader.view, nests[0]),
                {},
                reader.kernels(view_of(out, "out", 0), nests[1]),
                static_cast<const double*>(t.data),
                q,
                t.ndim == 1 ? 0 : count,
                linf,
                parallel_for};
  if (metric) {
    const View d = view_of(*metric, "metric", 0);
    STD_TORCH_CHECK(same_shape(d, reader.view), "metric: expected weight's shape ",
                    shape_text(reader.view.sizes, reader.view.ndim), ", got ", shape_text(d.sizes, d.ndim));
    call.metric = reader.kernels(d, nests[2]);
  }
  reader.view.dtype == DType::f64 ? prox_cpu<double>(call) : prox_cpu<float>(call);
  return out;
}

}  // namespace
}  // namespace loco::ring_prox

STABLE_TORCH_LIBRARY_IMPL(loco_ext, CPU, m) {
  m.impl("ring_penalty_hold", TORCH_BOX(&loco::ring_prox::ring_penalty_hold));
  m.impl("ring_norms", TORCH_BOX(&loco::ring_prox::ring_norms));
  m.impl("ring_prox", TORCH_BOX(&loco::ring_prox::ring_prox));
}
