// Ring norms and prox on an NVIDIA GPU, without torch. All calls are asynchronous: nothing here synchronizes with the
// GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "common/dtype.h"
#include "ring_prox/penalty.h"

namespace loco::ring_prox {

struct GpuTable;
struct JointTable;

// A strided tensor [filters, channels, taps]. Filter o, channel c, tap k lies at o * filter_stride + c * channel_stride
// + tap_offsets[k], in elements.
struct Placed {
  void* data = nullptr;  // null if the tensor is absent
  DType dtype = DType::f32;
  int64_t filter_stride = 0, channel_stride = 0;
  std::vector<int64_t> tap_offsets = {};
};

struct CudaCall {
  int64_t filters;
  Shape shape;  // of fewer than 2^31 weights
  Placed weight;
  Placed metric = {}, out = {};
  const double *plain = nullptr, *squared = nullptr;  // t and q of math.h, as in ProxCall of cpu.h
  int64_t thresholds_stride = 0;
  bool thresholds_on_device = false;  // whether they are in the GPU's memory rather than the host's
  bool linf = false;
};

// `table` must have been built from the call, and `memory` is a copy of its bytes on the GPU. `norms` is [filters,
// rings], float64 for float64 weights and float32 for all others.
void norms_cuda(const CudaCall& call, const GpuTable& table, const unsigned char* memory, void* norms, void* stream);
void prox_cuda(const CudaCall& call, const GpuTable& table, const unsigned char* memory, void* stream);

// Joint prox: all filters of a call share a factor, and calls of a kind share a launch. call.squared is needed. `table`
// must have been built from the calls, none of which is without filters, and `memory` begins with a copy of its bytes.
JointTable build_joint(const std::vector<CudaCall>& calls);
void joint_prox_cuda(const std::vector<CudaCall>& calls, const JointTable& table, unsigned char* memory, void* stream);

}  // namespace loco::ring_prox
