// A kernel's weights in the hands of the block that works on it: brought on chip, summed, written.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/gpu_memory.h"
#include "ring_prox/gpu_table.h"

namespace loco::ring_prox {

constexpr int kMostThreads = 256, kMostWarps = kMostThreads / 32;
constexpr int kMostSums = 3;  // that are made at a time

struct Weights {
  void* data;  // null: absent
  int64_t kernel_stride, channel_stride;
  DType dtype;
  bool flat;
};

struct Parameters {
  Weights weight, metric, out;
  const Tap* taps;
  const uint32_t* begins;
  const double *plain, *squared;
  int64_t thresholds_stride;
  uint32_t channels, tap_count;
  int rings;
  bool channels_fastest;

  LOCO_DEVICE uint32_t numel() const { return channels * tap_count; }

  LOCO_DEVICE Thresholds thresholds() const {
    const int64_t at = blockIdx.x * thresholds_stride;
    return {plain + at, squared ? squared + at : nullptr};
  }
};

// Where sums meet; two of each, so that one barrier a sum is enough.
struct Scratch {
  double parts[2][kMostSums][kMostWarps];
};

struct Add {
  LOCO_DEVICE double operator()(double a, double b) const { return a + b; }
};

struct Larger {
  LOCO_DEVICE double operator()(double a, double b) const { return b > a || is_nan(b) ? b : a; }
};

// Goes through a kernel's weights in the order of memory, from number i on.
class Walk {
 public:
  LOCO_DEVICE Walk(const Parameters& p, uint32_t i) : p_(p), size_(p.channels_fastest ? p.channels : p.tap_count) {
    outer_ = i / size_;
    inner_ = i - outer_ * size_;
  }
  LOCO_DEVICE void next() {
    if (++inner_ == size_) inner_ = 0, ++outer_;
  }
  LOCO_DEVICE uint32_t channel() const { return p_.channels_fastest ? inner_ : outer_; }
  LOCO_DEVICE const Tap& tap() const { return p_.taps[p_.channels_fastest ? outer_ : inner_]; }

 private:
  const Parameters& p_;
  uint32_t size_, outer_, inner_;
};

template <DType dtype>
using Constant = std::integral_constant<DType, dtype>;

template <class Visit>
LOCO_DEVICE void with_dtype(DType dtype, const Visit& visit) {
  if (dtype == DType::f32) return visit(Constant<DType::f32>());
  if (dtype == DType::f64) return visit(Constant<DType::f64>());
  if (dtype == DType::bf16) return visit(Constant<DType::bf16>());
  visit(Constant<DType::f16>());
}

// vector(i) for each 16 bytes at a boundary, one(i) for each element before and after them, from element i on.
template <DType dtype, class Vector, class One>
LOCO_DEVICE void split(const void* data, uint32_t count, const Vector& vector, const One& one) {
  constexpr uint32_t size = sizeof(Stored<dtype>), width = 16 / size;
  const uint32_t gap = (16 - reinterpret_cast<uintptr_t>(data) % 16) % 16 / size, head = gap < count ? gap : count;
  const uint32_t vectors = (count - head) / width, tail = head + vectors * width;
  for (uint32_t k = threadIdx.x; k < vectors; k += blockDim.x) vector(head + k * width);
  // Fewer than 16 are left, and a block has 32 threads or more.
  const uint32_t end = threadIdx.x < head ? threadIdx.x : tail + threadIdx.x - head;
  if (end < count) one(end);
}

// A block's kernel. T: the type that weights are held in meanwhile.
template <typename T, bool staged>
class Kernel {
 public:
  LOCO_DEVICE Kernel(const Parameters& p, unsigned char* memory, Scratch& scratch)
      : p_(p), scratch_(scratch), u_(reinterpret_cast<T*>(memory)), d_(u_ + p.numel()) {
    if constexpr (staged) {
      stage(p.weight, kWeight, u_);
      if (p.metric.data) stage(p.metric, kMetric, d_);
      __syncthreads();
    }
  }

  // visit(weight, its metric) for this thread's share of a ring.
  template <class Visit>
  LOCO_DEVICE void for_ring(int ring, const Visit& visit) const {
    const uint32_t begin = p_.begins[ring], end = p_.begins[ring + 1];
    if constexpr (staged) {
      for (uint32_t i = begin + threadIdx.x; i < end; i += blockDim.x) visit(u_[i], p_.metric.data ? d_[i] : T(1));
    } else {
      const uint32_t size = p_.channels_fastest ? p_.channels : (end - begin) / p_.channels;
      for (uint32_t i = threadIdx.x; i < end - begin; i += blockDim.x) {
        const uint32_t outer = i / size, inner = i - outer * size;
        const uint32_t rank = begin / p_.channels + (p_.channels_fastest ? outer : inner);
        const Tap& tap = p_.taps[p_.taps[rank].ordered];
        const uint32_t channel = p_.channels_fastest ? inner : outer;
        visit(weight(tap, channel), metric(tap, channel));
      }
    }
  }

  // What op makes of all threads' values, one after the other.
  template <int count, class Op>
  LOCO_DEVICE void reduce(double (&values)[count], const Op& op) {
    turn_ ^= 1;
#pragma unroll
    for (int k = 0; k < count; ++k) {
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        values[k] = op(values[k], __shfl_xor_sync(0xffffffff, values[k], lanes));
      }
      if (threadIdx.x % 32 == 0) scratch_.parts[turn_][k][threadIdx.x / 32] = values[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const double* parts = scratch_.parts[turn_][k];
      values[k] = parts[0];
      for (unsigned w = 1; w < blockDim.x / 32; ++w) values[k] = op(values[k], parts[w]);
    }
  }

  // A weight times the power of two that scaled_squares has found.
  LOCO_DEVICE T scaled(T u) const {
    if constexpr (sizeof(T) == 4) return u;
    return u * static_cast<T>(scale_);
  }

  // The largest size in rings begin .. end - 1; NaN if any is.
  LOCO_DEVICE double largest(int begin, int end) {
    double size[1] = {0};
    for (int r = begin; r < end; ++r) {
      for_ring(r, [&](T u, T) { size[0] = Larger()(size[0], std::fabs(static_cast<double>(u))); });
    }
    reduce(size, Larger());
    return size[0];
  }

  // Sums the squares of each ring to to[0], and of the weights times the metric to to[1] if that is asked for, times a
  // power of two that keeps them within float64, and returns that.
  template <int count>
  LOCO_DEVICE double scaled_squares(double* const (&to)[count]) {
    sum_squares(to);
    if constexpr (sizeof(T) == 4) return 1;  // their squares are within float64
    bool safe = true;
    for (int r = 0; r < p_.rings; ++r) safe = safe && to[0][r] > 1e-280 && to[0][r] < 1e280;
    if (safe) return 1;
    const double size = largest(0, p_.rings);
    if (!(size > 0) || size == kInfinity) return 1;
    int exponent;
    std::frexp(size, &exponent);
    scale_ = std::ldexp(1.0, exponent < -1020 ? 1020 : exponent > 1020 ? -1020 : -exponent);
    sum_squares(to);
    return scale_;
  }

  // out = shrunk(weight, its metric, its ring)
  template <class Shrunk>
  LOCO_DEVICE void write(const Shrunk& shrunk) const {
    const auto at = [&](const Walk& walk) {
      const Tap& tap = walk.tap();
      const uint32_t i = tap.begin + walk.channel() * tap.step;
      if constexpr (staged) return shrunk(u_[i], p_.metric.data ? d_[i] : T(1), tap.ring);
      return shrunk(weight(tap, walk.channel()), metric(tap, walk.channel()), tap.ring);
    };
    void* out = of_block(p_.out);
    if (!p_.out.flat) {
      for (uint32_t i = threadIdx.x; i < p_.numel(); i += blockDim.x) {
        const Walk walk(p_, i);
        store_any(p_.out.dtype, out, offset(p_.out, kOut, walk.tap(), walk.channel()), at(walk));
      }
      return;
    }
    with_dtype(p_.out.dtype, [&](auto constant) {
      constexpr DType dtype = decltype(constant)::value;
      using S = Stored<dtype>;
      const auto one = [&](uint32_t i) { static_cast<S*>(out)[i] = narrowed<dtype>(at(Walk(p_, i))); };
      const auto vector = [&](uint32_t i) {
        S values[16 / sizeof(S)];
        Walk walk(p_, i);
#pragma unroll
        for (S& value : values) value = narrowed<dtype>(at(walk)), walk.next();
        store_vector(out, i, values);
      };
      split<dtype>(out, p_.numel(), vector, one);
    });
  }

 private:
  // Where the block's kernel begins.
  static LOCO_DEVICE void* of_block(const Weights& weights) {
    return static_cast<char*>(weights.data) + blockIdx.x * weights.kernel_stride * element_size(weights.dtype);
  }

  static LOCO_DEVICE int64_t offset(const Weights& weights, OperandOf which, const Tap& tap, uint32_t channel) {
    return tap.offset[which] + channel * weights.channel_stride;
  }

  LOCO_DEVICE T weight(const Tap& tap, uint32_t channel) const {
    return load_any<T>(p_.weight.dtype, of_block(p_.weight), offset(p_.weight, kWeight, tap, channel));
  }

  LOCO_DEVICE T metric(const Tap& tap, uint32_t channel) const {
    if (p_.metric.data == nullptr) return 1;
    return load_any<T>(p_.metric.dtype, of_block(p_.metric), offset(p_.metric, kMetric, tap, channel));
  }

  // Brings the kernel to shared memory, in ring order.
  LOCO_DEVICE void stage(const Weights& weights, OperandOf which, T* to) const {
    const void* from = of_block(weights);
    const auto place = [&](const Walk& walk, T value) {
      const Tap& tap = walk.tap();
      to[tap.begin + walk.channel() * tap.step] = value;
    };
    if (!weights.flat) {
      for (uint32_t i = threadIdx.x; i < p_.numel(); i += blockDim.x) {
        const Walk walk(p_, i);
        place(walk, load_any<T>(weights.dtype, from, offset(weights, which, walk.tap(), walk.channel())));
      }
      return;
    }
    with_dtype(weights.dtype, [&](auto constant) {
      constexpr DType dtype = decltype(constant)::value;
      using S = Stored<dtype>;
      const auto one = [&](uint32_t i) { place(Walk(p_, i), widened<dtype, T>(static_cast<const S*>(from)[i])); };
      const auto vector = [&](uint32_t i) {
        T values[16 / sizeof(S)];
        load_vector<dtype>(from, i, values);
        Walk walk(p_, i);
#pragma unroll
        for (const T value : values) place(walk, value), walk.next();
      };
      split<dtype>(from, p_.numel(), vector, one);
    });
  }

  template <int count>
  LOCO_DEVICE void sum_squares(double* const (&to)[count]) {
    for (int r = 0; r < p_.rings; ++r) {
      double sums[count] = {};
      for_ring(r, [&](T u, T d) {
        const double value = scaled(u), weighed = value * static_cast<double>(d);
        sums[0] += value * value;
        if constexpr (count == 2) sums[1] += weighed * weighed;
      });
      reduce(sums, Add());
      for (int k = 0; k < count && threadIdx.x == 0; ++k) to[k][r] = sums[k];
    }
    __syncthreads();
  }

  const Parameters& p_;
  Scratch& scratch_;
  T *u_, *d_;
  double scale_ = 1;
  int turn_ = 0;
};

}  // namespace loco::ring_prox
