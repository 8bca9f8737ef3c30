// Checks and conversions of the ring operators' arguments, shared by all devices. The schemas are in schemas.h.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "common/stable.h"
#include "common/strided.h"
#include "ring_prox/penalty.h"

namespace loco::ring_prox {

using Ints = std::vector<int64_t>;

// A weight tensor of shape [filters, channels, *taps] and the ring of each tap, checked and converted to plain structs.
struct Reader {
  DeviceId device;
  View view;
  std::vector<int> ring_of_tap;
  Shape shape;  // channels_fastest where channels have stride 1 and there are several of them

  Reader(const Tensor& weight, const Ints& rings, int64_t count)
      : device(device_of(weight)), view(view_of(weight, "weight", 0, device)) {
    LOCO_CHECK(view.ndim >= 2 && view.ndim < kMaxDims, "weight: expected 2 to ", kMaxDims - 1,
               " dimensions, got shape ", shape_text(view));
    LOCO_CHECK(count >= 1 && count <= kMaxRings, "rings: expected 1 to ", kMaxRings, " of them, got ", count);
    int64_t taps = 1;
    for (int64_t k = 2; k < view.ndim; ++k) taps *= view.sizes[k];
    LOCO_CHECK(taps == static_cast<int64_t>(rings.size()), "rings: expected one entry for each of the ", taps,
               " taps of weight, got ", rings.size());
    LOCO_CHECK(view.sizes[1] > 0 && taps > 0, "weight: expected filters of at least one weight, got shape ",
               shape_text(view));
    for (const int64_t ring : rings) {
      LOCO_CHECK(ring >= 0 && ring < count, "rings: expected entries from 0 to ", count - 1, ", got ", ring);
      ring_of_tap.push_back(static_cast<int>(ring));
    }
    const bool channels_fastest = view.sizes[1] > 1 && view.strides[1] == 1;
    shape = {view.sizes[1], static_cast<int>(taps), static_cast<int>(count), ring_of_tap.data(), channels_fastest};
  }

  int64_t filter_count() const { return view.sizes[0]; }

  // Return the view of another tensor, which must be on the weight's device and have its shape.
  View view_like(const Tensor& tensor, const char* name) const {
    const View other = view_of(tensor, name, 0, device);
    LOCO_CHECK(same_shape(other, view), name, ": expected weight's shape ", shape_text(view), ", got ",
               shape_text(other));
    return other;
  }
};

// The thresholds t and q of math.h, [filters, rings], or [rings] with a stride of 0. `squared` may be null.
struct ThresholdRows {
  const double *plain, *squared;
  int64_t stride;
};

// device: the one that the thresholds are on.
inline ThresholdRows read_thresholds(const Tensor& thresholds, const std::optional<Tensor>& squared, int64_t filters,
                                     const DeviceId& device = DeviceId::cpu()) {
  const View t = view_of(thresholds, "thresholds", 0, device);
  LOCO_CHECK(t.dtype == DType::f64 && (t.ndim == 1 || t.ndim == 2) && thresholds.is_contiguous(),
             "thresholds: expected a contiguous float64 tensor of 1 or 2 dimensions");
  LOCO_CHECK(t.ndim == 1 || t.sizes[0] == filters, "thresholds: expected ", filters, " rows, got ", t.sizes[0]);
  ThresholdRows rows{static_cast<const double*>(t.data), nullptr, t.ndim == 1 ? 0 : t.sizes[1]};
  if (squared) {
    const View q = view_of(*squared, "squared", 0, device);
    LOCO_CHECK(q.dtype == DType::f64 && same_shape(q, t) && squared->is_contiguous(),
               "squared: expected a contiguous float64 tensor of the thresholds' shape");
    rows.squared = static_cast<const double*>(q.data);
  }
  return rows;
}

// Return an uninitialised tensor [filters, rings] for norms: float64 for a float64 weight, float32 otherwise.
inline Tensor empty_norms(const Tensor& weight, const Reader& reader) {
  const bool is_double = reader.view.dtype == DType::f64;
  const auto dtype = is_double ? torch::headeronly::ScalarType::Double : torch::headeronly::ScalarType::Float;
  const int64_t sizes[] = {reader.filter_count(), reader.shape.rings};
  return torch::stable::new_empty(weight, sizes, dtype);
}

}  // namespace loco::ring_prox
