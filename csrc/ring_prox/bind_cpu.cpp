// torch.ops.loco_ext.ring_norms and ring_prox on CPU tensors.
#include <optional>
#include <vector>

#include "common/convert.h"
#include "common/stable.h"
#include "common/strided.h"
#include "ring_prox/bind.h"
#include "ring_prox/cpu.h"

namespace loco::ring_prox {
namespace {

// Return the filters of a tensor. `nest` receives the sizes and strides of one filter; it must outlive the result,
// which points to it.
Filters filters_of(const View& tensor, const Shape& shape, Nest& nest) {
  int8_t order[kMaxDims];
  int axes = 0;
  const auto add = [&](int64_t d) {
    if (tensor.sizes[d] != 1) order[axes++] = static_cast<int8_t>(d);
  };
  if (shape.channels_fastest) add(1);
  for (int64_t d = tensor.ndim - 1; d >= 2; --d) add(d);
  if (!shape.channels_fastest) add(1);
  LOCO_CHECK(make_nest(order, axes, tensor.sizes, tensor.strides, nest), "weight: expected at most ", kMaxAxes,
             " strides that differ");
  return {{tensor.data, tensor.dtype, nest.flat() ? nullptr : &nest}, tensor.strides[0]};
}

Tensor ring_norms(Tensor weight, Ints rings, int64_t count) {
  const Reader reader(weight, rings, count);
  Tensor out = empty_norms(weight, reader);
  std::vector<double> norms(reader.filter_count() * count);
  Nest nest;
  const Call call{reader.filter_count(), reader.shape, parallel_for, filters_of(reader.view, reader.shape, nest)};
  reader.view.dtype == DType::f64 ? norms_cpu<double>(call, norms.data()) : norms_cpu<float>(call, norms.data());
  const View to = view_of(out, "out", 0);
  store(to.dtype, norms.data(), to.data, to.numel);
  return out;
}

Tensor ring_prox(Tensor weight, Ints rings, Tensor thresholds, std::optional<Tensor> squared,
                 std::optional<Tensor> metric, bool linf) {
  const Reader reader(weight, rings, thresholds.size(-1));
  const ThresholdRows rows = read_thresholds(thresholds, squared, reader.filter_count());
  Tensor out = torch::stable::empty_like(weight);
  Nest nests[3];
  Call call{reader.filter_count(), reader.shape, parallel_for, filters_of(reader.view, reader.shape, nests[0])};
  call.out = filters_of(view_of(out, "out", 0), reader.shape, nests[1]);
  call.thresholds = rows.plain, call.squared = rows.squared, call.thresholds_stride = rows.stride;
  call.linf = linf;
  if (metric) call.metric = filters_of(reader.view_like(*metric, "metric"), reader.shape, nests[2]);
  reader.view.dtype == DType::f64 ? prox_cpu<double>(call) : prox_cpu<float>(call);
  return out;
}

}  // namespace
}  // namespace loco::ring_prox

STABLE_TORCH_LIBRARY_IMPL(loco_ext, CPU, m) {
  m.impl("ring_norms", TORCH_BOX(&loco::ring_prox::ring_norms));
  m.impl("ring_prox", TORCH_BOX(&loco::ring_prox::ring_prox));
}
