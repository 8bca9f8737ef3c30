// Dispatch of the block-sparse operators on the CPU.
//
//   product         to[n, r] = bias[r] + sum over entries j of row r of from[n, source[j]] block(j)
//   value_gradient  values[j] = sum over n of from[n, source[j]]^T to[n, row of j]
//   transpose       to[n, pixel, channel] = from[n, channel, pixel]
//
// Shapes and strides of all pointers are given in cpu.h.
//
// A call goes to the kernels for its dtype and block size. Its work is a list of items (panels of rows and batch,
// entries, or tiles of pixels), of which each thread takes a contiguous range. Items are never split, so the number of
// threads changes no bit.
#include "block_sparse/cpu.h"

#include <cstring>

namespace loco::block_sparse {
namespace {

#ifdef LOCO_ALL_CAPABILITIES
bool has_pairs(DType dtype) { return dtype == DType::bf16 && capability() == kAvx512Bf16; }
const ProductKernels& products_for(DType dtype) { return has_pairs(dtype) ? avx512_bf16::products : products(); }
const GradientKernels& value_gradients_for(DType dtype) {
  return has_pairs(dtype) ? avx512_bf16::value_gradients : value_gradients();
}
#else
const ProductKernels& products_for(DType) { return products(); }
const GradientKernels& value_gradients_for(DType) { return value_gradients(); }
#endif

template <typename Call>
bool is_depthwise(const Call& call) {
  return call.depth == 1 && call.width == 1;
}

}  // namespace

void product_cpu(const Product& call) {
  const auto& kernels = is_depthwise(call) ? depthwise_products() : products_for(call.dtype);
  const auto& kernel = kernels.of[static_cast<int>(call.dtype)];
  const int64_t items = kernel.items(call);
  const int64_t work = call.first[call.rows] * call.groups * call.depth * call.width * call.batch;
  run_parallel(call.parallel_for, items, grain_of(work, items),
               [&](int64_t begin, int64_t end) { kernel.range(call, begin, end); });
}

void value_gradient_cpu(const ValueGradient& call) {
  const int64_t items = call.first[call.rows], block = call.groups * call.depth * call.width;
  if (items == 0) return;
  if (call.batch == 0) {
    std::memset(call.values, 0, items * block * element_size(call.dtype));
    return;
  }
  const auto& kernels = is_depthwise(call) ? depthwise_value_gradients() : value_gradients_for(call.dtype);
  const auto range = kernels.of[static_cast<int>(call.dtype)];
  run_parallel(call.parallel_for, items, grain_of(items * block * call.batch, items),
               [&](int64_t begin, int64_t end) { range(call, begin, end); });
}

void transpose_cpu(const Transpose& call) {
  const auto range = transposes().of[static_cast<int>(call.dtype)];
  const int64_t items = call.batch * ((call.pixels + kTransposePixels - 1) / kTransposePixels);
  run_parallel(call.parallel_for, items, 1 + kLeastMacs / (kTransposePixels * (1 + call.channels)),
               [&](int64_t begin, int64_t end) { range(call, begin, end); });
}

}  // namespace loco::block_sparse
