#include "ring_prox/gpu_table.h"

#include <algorithm>

#include "common/mistake.h"

namespace loco::ring_prox {

unsigned threads_for(const Shape& shape) {
  constexpr int64_t kShare = 32;  // weights per thread
  unsigned threads = 32;
  while (threads < kMostThreads && threads * kShare < shape.numel()) threads *= 2;
  return threads;
}

RingOrder ring_order(const Shape& shape) {
  std::vector<int> order(shape.taps), rank(shape.taps);
  for (int k = 0; k < shape.taps; ++k) order[k] = k;
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return LOCO_MISTAKE(ring_order) ? a < b : shape.ring_of_tap[a] < shape.ring_of_tap[b];
  });
  for (int k = 0; k < shape.taps; ++k) rank[order[k]] = k;

  const auto channels = static_cast<uint32_t>(shape.channels);
  RingOrder result{std::vector<Tap>(shape.taps), std::vector<uint32_t>(shape.rings + 1, 0)};
  std::vector<uint32_t>& begins = result.begins;
  for (int k = 0; k < shape.taps; ++k) begins[shape.ring_of_tap[k] + 1] += channels;
  for (int r = 0; r < shape.rings; ++r) begins[r + 1] += begins[r];
  for (int k = 0; k < shape.taps; ++k) {
    const int ring = shape.ring_of_tap[k];
    const uint32_t first = begins[ring] / channels, of_ring = begins[ring + 1] / channels - first;
    Tap& tap = result.taps[k];
    tap.begin = shape.channels_fastest ? rank[k] * channels : begins[ring] + (rank[k] - first);
    tap.step = shape.channels_fastest ? 1 : of_ring;
    tap.ring = ring - (LOCO_MISTAKE(ring_ring) && ring > 0);
    tap.ordered = order[k];
  }
  return result;
}

GpuTable build(const CudaCall& call) {
  const Shape& shape = call.shape;
  const Placed* operands[] = {&call.weight, &call.metric, &call.out};
  std::vector<Offsets> offsets(shape.taps);
  for (int k = 0; k < shape.taps; ++k) {
    for (int n = 0; n < kOperands; ++n) {
      offsets[k].of[n] = operands[n]->tap_offsets.empty() ? 0 : operands[n]->tap_offsets[k];
    }
  }
  const RingOrder order = ring_order(shape);
  GpuTable table{};
  table.offsets = append(table.bytes, offsets.data(), shape.taps);
  table.taps = append(table.bytes, order.taps.data(), shape.taps);
  table.begins = append(table.bytes, order.begins.data(), shape.rings + 1);
  const int64_t rows = call.thresholds_stride == 0 ? 1 : call.filters;
  if (call.thresholds_on_device) return table;
  if (call.plain) table.plain = append(table.bytes, call.plain, rows * shape.rings);
  if (call.squared) table.squared = append(table.bytes, call.squared, rows * shape.rings);
  return table;
}

bool is_flat(const Placed& operand, const Shape& shape) {
  const int64_t tap_step = shape.channels_fastest ? shape.channels : 1;
  const int64_t channel_step = shape.channels_fastest ? 1 : shape.taps;
  for (int k = 0; k < shape.taps; ++k) {
    if (operand.tap_offsets[k] != k * tap_step) return false;
  }
  return shape.channels == 1 || operand.channel_stride == channel_step;
}

}  // namespace loco::ring_prox
