#include "ring_prox/bind.h"

#include <memory>

#include "ring_prox/registered_penalty.h"

namespace loco::ring_prox {

int64_t ring_penalty_register(Tensor, Ints rings, Tensor thresholds, std::optional<Tensor> squared) {
  const auto read = [](const Tensor& tensor, const char* name) {
    const View view = view_of(tensor, name, 0);
    STD_TORCH_CHECK(view.dtype == DType::f64 && view.ndim == 1 && view.numel >= 1 && view.numel <= kMaxRings &&
                        tensor.is_contiguous(),
                    name, ": expected a contiguous float64 tensor of 1 to ", kMaxRings, " numbers");
    const auto* values = static_cast<const double*>(view.data);
    return std::vector<double>(values, values + view.numel);
  };
  auto registered = std::make_shared<RegisteredPenalty>();
  Penalty& penalty = registered->penalty;
  penalty.plain = read(thresholds, "thresholds");
  if (squared) penalty.squared = read(*squared, "squared");
  STD_TORCH_CHECK(!squared || penalty.squared.size() == penalty.plain.size(), "squared: expected ",
                  penalty.plain.size(), " numbers, got ", penalty.squared.size());
  for (const int64_t ring : rings) {
    STD_TORCH_CHECK(ring >= 0 && ring < penalty.rings(), "rings: expected entries from 0 to ", penalty.rings() - 1,
                    ", got ", ring);
    penalty.ring_of_tap.push_back(static_cast<int>(ring));
  }
  return register_object(std::move(registered));
}

}  // namespace loco::ring_prox
