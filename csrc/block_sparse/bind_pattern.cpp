#include "block_sparse/bind_pattern.h"

// torch 2.11's copy of pybind11 raises an error if the stable ABI is requested. This file uses none of the stable ABI.
#undef TORCH_TARGET_VERSION
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>

#include "block_sparse/pattern.h"

namespace py = pybind11;

namespace loco::block_sparse {
namespace {

using Array = py::array_t<int64_t, py::array::c_style>;
using Tables = std::array<Array, kAxes>;  // each of shape [out, taps]

// Return an array that takes ownership of the indices without copying them.
Array to_array(Indices&& indices) {
  auto* owned = new Indices(std::move(indices));
  const py::capsule owner(owned, [](void* pointer) { delete static_cast<Indices*>(pointer); });
  return Array(static_cast<py::ssize_t>(owned->size()), owned->data(), owner);
}

py::tuple to_tuple(Pattern&& pattern) {
  return py::make_tuple(to_array(std::move(pattern.crow)), to_array(std::move(pattern.col)));
}

Rows to_rows(const Array& crow, const Array& col) { return {crow.data(), col.data(), crow.size() - 1}; }

Axes to_axes(const Tables& pixels, const Sizes& image) {
  Axes axes;
  for (int axis = 0; axis < kAxes; ++axis) {
    axes[axis] = {pixels[axis].data(), pixels[axis].shape(0), pixels[axis].shape(1), image[axis]};
  }
  return axes;
}

// Call a function of pattern.h without the GIL, so that other Python threads can run meanwhile, and return its result.
template <typename F>
auto without_gil(F&& compute) {
  const py::gil_scoped_release release;
  return compute();
}

}  // namespace

void define_pattern(py::module_& module) {
  module.def("conv_pattern", [](const Tables& pixels, const Sizes& image) {
    const Axes axes = to_axes(pixels, image);
    return to_tuple(without_gil([&] { return conv_pattern(axes); }));
  });
  module.def("conv_taps", [](const Tables& pixels, const Sizes& image, const Array& crow, const Array& col) {
    const Axes axes = to_axes(pixels, image);
    const Rows rows = to_rows(crow, col);
    Taps taps = without_gil([&] { return conv_taps(axes, rows); });
    return py::make_tuple(to_array(std::move(taps.block)), to_array(std::move(taps.tap)),
                          to_array(std::move(taps.output)));
  });
  module.def("grow", [](const Array& crow, const Array& col, const Sizes& image, int64_t radius, bool wraps,
                        const Array& seeds) {
    const Rows rows = to_rows(crow, col);
    const int64_t* from = seeds.data();
    return to_tuple(without_gil([&] { return grow(rows, image, radius, wraps, from); }));
  });
  module.def("unite", [](const Array& crow, const Array& col, const Array& other_crow, const Array& other_col) {
    const Rows rows = to_rows(crow, col), other = to_rows(other_crow, other_col);
    return to_tuple(without_gil([&] { return unite(rows, other); }));
  });
  module.def("locate", [](const Array& crow, const Array& col, const Array& whole_crow, const Array& whole_col) {
    const Rows rows = to_rows(crow, col), whole = to_rows(whole_crow, whole_col);
    return to_array(without_gil([&] { return locate(rows, whole); }));
  });
  module.def("are_valid", [](const Array& crow, const Array& col, int64_t n_in) {
    const Rows rows = to_rows(crow, col);
    return without_gil([&] { return are_valid(rows, col.size(), n_in); });
  });
  module.def("transpose", [](const Array& crow, const Array& col, int64_t n_in) {
    const Rows rows = to_rows(crow, col);
    Transposed result = without_gil([&] { return transpose(rows, n_in); });
    return py::make_tuple(to_array(std::move(result.crow)), to_array(std::move(result.rows)),
                          to_array(std::move(result.blocks)));
  });
}

}  // namespace loco::block_sparse
