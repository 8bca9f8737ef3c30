// torch.ops.loco_ext.mixed_conv2d on CPU tensors. Schema: schemas.h.
#include <algorithm>
#include <vector>

#include "common/pages.h"
#include "common/stable.h"
#include "mixed_conv/cpu.h"

namespace loco::mixed_conv {
namespace {

// Bound of the numbers that sizes are computed from, so that no product overflows.
constexpr int64_t kMost = int64_t{1} << 31;
// The copy of a band, zeros included, may have at most kSpare elements plus kTimes as many as the images and the result
// have.
constexpr double kSpare = int64_t{1} << 28, kTimes = 64;

// Return the view of a tensor after checking that it is contiguous and has the images' dtype.
View dense(const Tensor& tensor, const char* list, size_t index, int64_t ndim, DType dtype) {
  const View view = view_of(tensor, list, index);
  LOCO_CHECK(view.ndim == ndim && view.dtype == dtype && tensor.is_contiguous(), list, "[", index,
             "]: expected a contiguous tensor of ", ndim, " dimensions, of x's dtype");
  return view;
}

// Return the images of a contiguous tensor [batch, channels, height, width], or, with channels_last, [batch, height,
// width, channels].
Images images_of(const View& view, bool channels_last) {
  const int64_t *size = view.sizes, first = size[1], second = size[2], third = size[3];
  if (!channels_last)
    return {view.data, size[0], first, second, third, first * second * third, second * third, third, 1};
  return {view.data, size[0], third, first, second, first * second * third, 1, second * third, third};
}

// Return the output channel of each filter, [filters], one part's filters after the other's. `order` lists the filter
// of each output channel; without it the channels are in the filters' order.
std::vector<int64_t> places(const std::optional<Tensor>& order, int64_t filters) {
  std::vector<int64_t> places(filters, -1);
  const int64_t* filter = nullptr;
  if (order) {
    const Indices indices = indices_of(*order, "order");
    LOCO_CHECK(indices.count == filters, "order: expected ", filters, " entries, got ", indices.count);
    filter = indices.data;
  }
  for (int64_t channel = 0; channel < filters; ++channel) {
    const int64_t of = filter ? filter[channel] : channel;
    LOCO_CHECK(of >= 0 && of < filters && places[of] < 0, "order: expected each of 0 to ", filters - 1, " once");
    places[of] = channel;
  }
  return places;
}

int64_t result_size(int64_t size, int64_t before, int64_t after, int64_t taps, int64_t step, int64_t dilation) {
  const int64_t room = size + before + after - dilation * (taps - 1) - 1;
  return room < 0 ? 0 : room / step + 1;
}

// Check that a band fits into memory: large pads, strides and dilations may need more memory than there is, however
// small the images and the result are.
void check_room(const Images& from, const View& to, int64_t width, const std::vector<Part>& parts,
                const int64_t* stride, const int64_t* dilation) {
  constexpr double kLanes = 16;
  int64_t top = parts[0].top, left = parts[0].left;
  for (const Part& part : parts) top = std::max(top, part.top), left = std::max(left, part.left);
  double rows = 1, columns = 0;
  for (const Part& part : parts) {
    rows = std::max(rows, 1.0 + top - part.top + double(part.height - 1) * dilation[0]);
    columns = std::max(columns, double(left - part.left) + double(part.width - 1) * dilation[1]);
  }
  const double images = std::min<double>(kLanes, from.batch), read = double(from.batch) * from.channels;
  const double copied = rows * (width + kLanes + columns / stride[1]) * images * stride[1] * from.channels;
  const double most = kSpare + kTimes * (read * from.height * from.width + to.numel);
  LOCO_CHECK(copied <= most, "pads: expected pads, strides and dilations for which no more than ", most,
             " elements are kept beside the images, got ", copied);
}

Tensor mixed_conv2d(Tensor x, std::vector<Tensor> weights, std::vector<Tensor> biases, std::vector<int64_t> pads,
                    std::optional<Tensor> order, std::vector<int64_t> stride, std::vector<int64_t> dilation,
                    bool channels_last) {
  const View view = view_of(x, "x", 0);
  const DType dtype = view.dtype;
  LOCO_CHECK(view.ndim == 4 && x.is_contiguous() && (dtype == DType::f32 || dtype == DType::f64),
             "x: expected a contiguous float32 or float64 tensor of four dimensions");
  const Images from = images_of(view, channels_last);
  LOCO_CHECK(!weights.empty() && (biases.empty() || biases.size() == weights.size()) &&
                 pads.size() == 4 * weights.size() && stride.size() == 2 && dilation.size() == 2 && stride[0] > 0 &&
                 stride[1] > 0 && dilation[0] > 0 && dilation[1] > 0,
             "weights: expected one tensor or more, a bias for each or none, four pads for each, and positive "
             "strides and dilations for two axes");
  for (const auto* numbers : {&pads, &stride, &dilation}) {
    for (const int64_t number : *numbers)
      LOCO_CHECK(number > -kMost && number < kMost, "pads, stride, dilation: expected less than 2^31, got ", number);
  }
  std::vector<Part> parts;
  int64_t filters = 0, height = 0, width = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const View weight = dense(weights[i], "weights", i, 4, dtype);
    const int64_t* size = weight.sizes;
    LOCO_CHECK(size[1] == from.channels && weight.numel > 0, "weights[", i, "]: expected filters that read x's ",
               from.channels, " channels, got shape ", shape_text(size, 4));
    const int64_t* pad = &pads[4 * i];
    const int64_t rows = result_size(from.height, pad[0], pad[1], size[2], stride[0], dilation[0]);
    const int64_t columns = result_size(from.width, pad[2], pad[3], size[3], stride[1], dilation[1]);
    LOCO_CHECK(rows > 0 && columns > 0 && (i == 0 || (rows == height && columns == width)), "pads[", i,
               "]: expected results of one size for all parts, at least 1, got (", rows, ", ", columns, ")");
    height = rows, width = columns;
    const void* bias = nullptr;
    if (!biases.empty()) {
      const View view = dense(biases[i], "biases", i, 1, dtype);
      LOCO_CHECK(view.numel == size[0], "biases[", i, "]: expected ", size[0], " elements, got ", view.numel);
      bias = view.data;
    }
    parts.push_back({weight.data, bias, size[0], size[2], size[3], pad[0], pad[2], nullptr});
    filters += size[0];
  }
  const std::vector<int64_t> channels = places(order, filters);
  const int64_t* next = channels.data();
  for (Part& part : parts) part.channels = next, next += part.filters;
  std::vector<int64_t> shape{from.batch, filters, height, width};
  if (channels_last) shape = {from.batch, height, width, filters};
  Tensor out = torch::stable::new_empty(x, shape);
  const View to = view_of(out, "out", 0);
  if (to.numel == 0) return out;
  check_room(from, to, width, parts, stride.data(), dilation.data());
  expect_writes(to.data, to.numel * element_size(dtype));
  convolve_cpu({dtype,
                from,
                images_of(to, channels_last),
                parts.data(),
                static_cast<int64_t>(parts.size()),
                {stride[0], stride[1]},
                {dilation[0], dilation[1]},
                num_threads(),
                parallel_for});
  return out;
}

}  // namespace
}  // namespace loco::mixed_conv

STABLE_TORCH_LIBRARY_IMPL(loco_ext, CPU, m) { m.impl("mixed_conv2d", TORCH_BOX(&loco::mixed_conv::mixed_conv2d)); }
