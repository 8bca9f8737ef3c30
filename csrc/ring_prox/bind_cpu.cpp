// torch.ops.loco_ext.ring_norms and ring_prox on CPU tensors.
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "common/convert.h"
#include "common/stable.h"
#include "common/strided.h"
#include "ring_prox/bind.h"
#include "ring_prox/cpu.h"
#include "ring_prox/math.h"
#include "ring_prox/penalty.h"

namespace loco::ring_prox {
namespace {

// nest is where the kernels' own is kept.
Kernels kernels_of(const View& tensor, const Shape& shape, Nest& nest) {
  int8_t order[kMaxDims];
  int axes = 0;
  if (shape.channels_fastest) order[axes++] = 1;
  for (int64_t d = tensor.ndim - 1; d >= 2; --d) order[axes++] = static_cast<int8_t>(d);
  if (!shape.channels_fastest) order[axes++] = 1;
  int used = 0;
  for (int k = 0; k < axes; ++k) {
    if (tensor.sizes[order[k]] != 1) order[used++] = order[k];
  }
  STD_TORCH_CHECK(make_nest(order, used, tensor.sizes, tensor.strides, nest), "weight: expected at most ", kMaxAxes,
                  " strides that differ");
  return {{tensor.data, tensor.dtype, nest.flat() ? nullptr : &nest}, tensor.strides[0]};
}

Tensor ring_norms(Tensor weight, Ints rings, int64_t count) {
  const Reader reader(weight, rings, count);
  Tensor out = empty_norms(weight, reader);
  std::vector<double> norms(reader.kernel_count() * count);
  Nest nest;
  const NormsCall call{reader.kernel_count(), reader.shape, kernels_of(reader.view, reader.shape, nest), norms.data(),
                       parallel_for};
  reader.view.dtype == DType::f64 ? norms_cpu<double>(call) : norms_cpu<float>(call);
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

Tensor ring_prox(Tensor weight, Ints rings, Tensor thresholds, std::optional<Tensor> squared,
                 std::optional<Tensor> metric, bool linf) {
  const Reader reader(weight, rings, thresholds.size(-1));
  const ThresholdRows rows = read_thresholds(thresholds, squared, reader.kernel_count());
  Tensor out = torch::stable::empty_like(weight);
  Nest nests[3];
  ProxCall call{reader.kernel_count(),
                reader.shape,
                kernels_of(reader.view, reader.shape, nests[0]),
                {},
                kernels_of(view_of(out, "out", 0), reader.shape, nests[1]),
                rows.plain,
                rows.squared,
                rows.stride,
                linf,
                parallel_for};
  if (metric) call.metric = kernels_of(reader.view_like(*metric, "metric"), reader.shape, nests[2]);
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
