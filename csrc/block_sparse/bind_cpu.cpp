// torch.ops.loco_ext.block_sparse_matmul and its gradients on CPU tensors.
#include <optional>

#include "block_sparse/cpu.h"
#include "common/pages.h"
#include "common/stable.h"

namespace loco::block_sparse {
namespace {

// Return indices after checking that they are in [0, bound).
Indices bounded(const Tensor& tensor, const char* name, int64_t bound) {
  const Indices indices = indices_of(tensor, name);
  uint64_t largest = 0;  // as unsigned numbers, negative indices exceed any bound
  for (int64_t i = 0; i < indices.count; ++i) {
    const auto index = static_cast<uint64_t>(indices.data[i]);
    largest = index > largest ? index : largest;
  }
  LOCO_CHECK(indices.count == 0 || largest < static_cast<uint64_t>(bound), name, ": expected indices from 0 to ",
             bound - 1);
  return indices;
}

// Return row starts after checking that they begin at 0, never descend and end at `total`.
Indices row_starts(const Tensor& tensor, const char* name, int64_t total) {
  const Indices starts = indices_of(tensor, name);
  bool ordered = starts.count >= 1 && starts.data[0] == 0 && starts.data[starts.count - 1] == total;
  for (int64_t i = 1; i < starts.count; ++i) ordered &= starts.data[i - 1] <= starts.data[i];
  LOCO_CHECK(ordered, name, ": expected row starts that do not descend, from 0 to ", total);
  return starts;
}

// Activations [batch, pixels, channels] in which channels have stride 1, or, with by_channel, pixels may have it
// instead.
struct Activations {
  View view;

  Activations(const Tensor& tensor, const char* name, bool by_channel = false) : view(view_of(tensor, name, 0)) {
    LOCO_CHECK(view.ndim == 3 && (channel_stride() == 1 || (by_channel && view.strides[1] == 1)), name,
               ": expected three dimensions, the channels of a pixel side by side");
  }

  int64_t batch() const { return view.sizes[0]; }
  int64_t pixels() const { return view.sizes[1]; }
  int64_t channels() const { return view.sizes[2]; }
  int64_t channel_stride() const { return view.sizes[2] <= 1 ? 1 : view.strides[2]; }
  Pixels layout() const { return {view.data, view.strides[0], view.strides[1], channel_stride()}; }
};

// Block values [blocks, groups, channels of a group in, channels of a group out], contiguous.
struct Blocks {
  View view;

  Blocks(const Tensor& tensor, DType dtype) : view(view_of(tensor, "values", 0)) {
    LOCO_CHECK(view.ndim == 4 && tensor.is_contiguous() && view.dtype == dtype,
               "values: expected a contiguous tensor of four dimensions, of the activations' dtype");
  }

  int64_t count() const { return view.sizes[0]; }
  int64_t groups() const { return view.sizes[1]; }
  int64_t in() const { return view.sizes[2]; }
  int64_t out() const { return view.sizes[3]; }
  bool of_one_element() const { return in() == 1 && out() == 1; }
};

Tensor empty(const Tensor& like, std::initializer_list<int64_t> sizes, DType dtype) {
  const std::vector<int64_t> shape(sizes);
  Tensor out = torch::stable::new_empty(like, shape);
  const View view = view_of(out, "out", 0);
  expect_writes(view.data, view.numel * element_size(dtype));
  return out;
}

Tensor by_pixel(Tensor x) {
  const View from = view_of(x, "x", 0);
  LOCO_CHECK(from.ndim == 3, "x: expected three dimensions");
  Tensor out = empty(x, {from.sizes[0], from.sizes[1], from.sizes[2]}, from.dtype);
  if (from.sizes[1] > 1 && from.strides[1] != 1) return torch::stable::copy_(out, x);
  transpose_cpu({from.dtype, from.sizes[0], from.sizes[1], from.sizes[2], from.data, from.strides[0], from.strides[2],
                 view_of(out, "out", 0).data, parallel_for});
  return out;
}

Tensor matmul(Tensor x, Tensor values, Tensor crow_indices, Tensor col_indices, std::optional<Tensor> bias) {
  const DType dtype = view_of(x, "x", 0).dtype;
  const Blocks blocks(values, dtype);
  const Activations from(x, "x", blocks.of_one_element());
  const Indices columns = bounded(col_indices, "col_indices", from.pixels());
  const Indices starts = row_starts(crow_indices, "crow_indices", columns.count);
  LOCO_CHECK(blocks.count() == columns.count && from.channels() == blocks.groups() * blocks.in(),
             "values: expected a block for each of the ", columns.count, " entries of the pattern and x's ",
             from.channels(), " channels, got shape ", shape_text(blocks.view));
  const int64_t rows = starts.count - 1, channels = blocks.groups() * blocks.out();
  const void* start = nullptr;
  if (bias) {
    const View view = view_of(*bias, "bias", 0);
    LOCO_CHECK(view.ndim == 2 && view.sizes[0] == rows && view.sizes[1] == channels && view.dtype == dtype &&
                   bias->is_contiguous(),
               "bias: expected a contiguous tensor of shape (", rows, ", ", channels, ") of x's dtype");
    start = view.data;
  }
  Tensor y = empty(x, {from.batch(), rows, channels}, dtype);
  product_cpu({dtype, from.batch(), rows, blocks.groups(), blocks.in(), blocks.out(), starts.data, columns.data,
               nullptr, from.layout(), Activations(y, "y").layout(), blocks.view.data, start, parallel_for});
  return y;
}

Tensor input_gradient(Tensor grad, Tensor values, Tensor crow_indices, Tensor rows, Tensor blocks) {
  const Activations from(grad, "grad");
  const DType dtype = from.view.dtype;
  const Blocks all(values, dtype);
  const Indices sources = bounded(rows, "rows", from.pixels()), order = bounded(blocks, "blocks", all.count());
  const Indices starts = row_starts(crow_indices, "crow_indices", sources.count);
  LOCO_CHECK(order.count == sources.count && from.channels() == all.groups() * all.out(), "values: expected grad's ",
             from.channels(), " channels, and as many blocks as rows, got shape ", shape_text(all.view));
  const int64_t pixels = starts.count - 1;
  Tensor out = empty(grad, {from.batch(), pixels, all.groups() * all.in()}, dtype);
  product_cpu({dtype, from.batch(), pixels, all.groups(), all.out(), all.in(), starts.data, sources.data, order.data,
               from.layout(), Activations(out, "out").layout(), all.view.data, nullptr, parallel_for});
  return out;
}

Tensor value_gradient(Tensor x, Tensor grad, Tensor crow_indices, Tensor col_indices, int64_t groups) {
  const Activations from(x, "x"), to(grad, "grad");
  const DType dtype = from.view.dtype;
  const Indices columns = bounded(col_indices, "col_indices", from.pixels());
  const Indices starts = row_starts(crow_indices, "crow_indices", columns.count);
  LOCO_CHECK(to.view.dtype == dtype && to.batch() == from.batch() && to.pixels() == starts.count - 1,
             "grad: expected x's dtype and batch, and ", starts.count - 1, " pixels, got shape ", shape_text(to.view));
  LOCO_CHECK(groups >= 1 && from.channels() % groups == 0 && to.channels() % groups == 0,
             "groups: expected a divisor of ", from.channels(), " and ", to.channels(), " channels, got ", groups);
  const int64_t in = from.channels() / groups, out = to.channels() / groups;
  Tensor values = empty(x, {columns.count, groups, in, out}, dtype);
  value_gradient_cpu({dtype, from.batch(), to.pixels(), groups, in, out, starts.data, columns.data, from.layout(),
                      to.layout(), view_of(values, "values", 0).data, parallel_for});
  return values;
}

}  // namespace
}  // namespace loco::block_sparse

STABLE_TORCH_LIBRARY_IMPL(loco_ext, CPU, m) {
  m.impl("block_sparse_by_pixel", TORCH_BOX(&loco::block_sparse::by_pixel));
  m.impl("block_sparse_matmul", TORCH_BOX(&loco::block_sparse::matmul));
  m.impl("block_sparse_input_gradient", TORCH_BOX(&loco::block_sparse::input_gradient));
  m.impl("block_sparse_value_gradient", TORCH_BOX(&loco::block_sparse::value_gradient));
}
