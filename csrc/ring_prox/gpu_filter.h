// Loading, visiting and writing the weights of the filter that a block works on.
#pragma once

#include <cstdint>

#include "common/gpu_memory.h"
#include "common/mistake.h"
#include "ring_prox/gpu_rings.h"
#include "ring_prox/math.h"

namespace loco::ring_prox {

struct Weights {
  void* data;  // null if the tensor is absent
  int64_t filter_stride, channel_stride;
  DType dtype;
  bool flat;
};

struct Parameters {
  Weights weight, metric, out;
  const Offsets* offsets;
  Rings rings;
  const double *plain, *squared;
  int64_t thresholds_stride;

  LOCO_DEVICE Thresholds thresholds(int64_t filter) const {
    const int64_t at = filter * thresholds_stride;
    return {plain + at, squared ? squared + at : nullptr};
  }
};

// Call vector(i) for each aligned vector of 16 bytes, which begins at element i, and one(i) for each element before and
// after the vectors. The work is divided among the threads of the block.
template <DType dtype, class Vector, class One>
LOCO_DEVICE void split(const void* data, uint32_t count, const Vector& vector, const One& one) {
  constexpr uint32_t size = sizeof(Stored<dtype>), width = 16 / size;
  const AlignedSpan span(data, count, size);
  for (uint32_t k = threadIdx.x; k < span.vectors; k += blockDim.x) vector(span.head + k * width);
  if (threadIdx.x < span.ends()) one(span.end(threadIdx.x));  // fewer than 32 ends, and a block has at least 32 threads
}

// The filter that this block works on. T is the compute type of the weights; `staged` tells whether they are copied to
// shared memory.
template <typename T, bool staged>
class BlockFilter {
 public:
  LOCO_DEVICE BlockFilter(const Parameters& p, int64_t filter, unsigned char* memory)
      : p_(p), filter_(filter), ordered_(in_ring_order(p, memory)) {
    if constexpr (staged) {
      stage(p.weight, kWeight, ordered_.weights);
      if (p.metric.data) stage(p.metric, kMetric, ordered_.metrics);
      if (!LOCO_MISTAKE(ring_staged)) __syncthreads();
    }
  }

  // Call visit(weight, its metric) for this thread's share of a ring.
  template <class Visit>
  LOCO_DEVICE void for_ring(int ring, const Visit& visit) const {
    if constexpr (staged) {
      ordered_.for_ring(ring, visit);
    } else {
      const Rings& rings = p_.rings;
      const uint32_t begin = rings.begins[ring], end = rings.begins[ring + 1];
      const uint32_t size = rings.channels_fastest ? rings.channels : (end - begin) / rings.channels;
      for (uint32_t i = threadIdx.x; i < end - begin; i += blockDim.x) {
        const uint32_t outer = i / size, inner = i - outer * size;
        const uint32_t rank = begin / rings.channels + (rings.channels_fastest ? outer : inner);
        const uint32_t tap = rings.taps[rank].ordered, channel = rings.channels_fastest ? inner : outer;
        visit(weight(tap, channel), metric(tap, channel));
      }
    }
  }

  // Write out = shrunk(weight, its metric, its ring).
  template <class Shrunk>
  LOCO_DEVICE void write(const Shrunk& shrunk) const {
    const auto at = [&](const Walk& walk) {
      if constexpr (staged) {
        const uint32_t i = walk.place();
        return shrunk(ordered_.weight(i), ordered_.metric(i), walk.ring());
      }
      return shrunk(weight(walk.tap(), walk.channel()), metric(walk.tap(), walk.channel()), walk.ring());
    };
    void* out = of_block(p_.out);
    if (!p_.out.flat) {
      for (uint32_t i = threadIdx.x; i < p_.rings.numel(); i += blockDim.x) {
        const Walk walk(p_.rings, i);
        store_any(p_.out.dtype, out, offset(p_.out, kOut, walk.tap(), walk.channel()), at(walk));
      }
      return;
    }
    with_dtype(p_.out.dtype, [&](auto constant) {
      constexpr DType dtype = decltype(constant)::value;
      using S = Stored<dtype>;
      const auto one = [&](uint32_t i) { static_cast<S*>(out)[i] = narrowed<dtype>(at(Walk(p_.rings, i))); };
      const auto vector = [&](uint32_t i) {
        T values[16 / sizeof(S)];
        Walk walk(p_.rings, i);
#pragma unroll
        for (T& value : values) value = at(walk), walk.next();
        store_vector<dtype>(out, i, values);
      };
      split<dtype>(out, p_.rings.numel(), vector, one);
    });
  }

 private:
  static LOCO_DEVICE Ordered<T, true> in_ring_order(const Parameters& p, unsigned char* memory) {
    T* weights = reinterpret_cast<T*>(memory);
    return {p.rings, weights, p.metric.data ? weights + p.rings.numel() : nullptr};
  }

  LOCO_DEVICE void* of_block(const Weights& weights) const {
    return static_cast<char*>(weights.data) +
           filter_ * (LOCO_MISTAKE(ring_filter) ? 1 : weights.filter_stride) * element_size(weights.dtype);
  }

  LOCO_DEVICE int64_t offset(const Weights& weights, OperandOf which, uint32_t tap, uint32_t channel) const {
    return p_.offsets[tap].of[which] + channel * weights.channel_stride;
  }

  LOCO_DEVICE T weight(uint32_t tap, uint32_t channel) const {
    return load_any<T>(p_.weight.dtype, of_block(p_.weight), offset(p_.weight, kWeight, tap, channel));
  }

  LOCO_DEVICE T metric(uint32_t tap, uint32_t channel) const {
    if (p_.metric.data == nullptr) return 1;
    return finite_metric(load_any<T>(p_.metric.dtype, of_block(p_.metric), offset(p_.metric, kMetric, tap, channel)));
  }

  LOCO_DEVICE void stage(const Weights& weights, OperandOf which, T* to) const {
    const void* from = of_block(weights);
    if (!weights.flat) {
      for (uint32_t i = threadIdx.x; i < p_.rings.numel(); i += blockDim.x) {
        const Walk walk(p_.rings, i);
        to[walk.place()] = load_any<T>(weights.dtype, from, offset(weights, which, walk.tap(), walk.channel()));
      }
      return;
    }
    with_dtype(weights.dtype, [&](auto constant) {
      constexpr DType dtype = decltype(constant)::value;
      using S = Stored<dtype>;
      const auto one = [&](uint32_t i) {
        to[Walk(p_.rings, i).place()] = widened<dtype, T>(static_cast<const S*>(from)[i]);
      };
      const auto vector = [&](uint32_t i) {
        T values[16 / sizeof(S)];
        load_vector<dtype>(from, i, values);
        Walk walk(p_.rings, i);
#pragma unroll
        for (const T value : values) to[walk.place()] = value, walk.next();
      };
      split<dtype>(from, p_.rings.numel(), vector, one);
    });
  }

  const Parameters& p_;
  int64_t filter_;
  Ordered<T, true> ordered_;
};

}  // namespace loco::ring_prox
