// Schemas of all operators, and their implementations for CUDA tensors.
#pragma once

#include "common/stable.h"

namespace loco {

// optim_step serves all update rules; optim_step/step_args.h describes its arguments, in the same order. `rule` is a
// RuleId, and `flags` are maximize, l1, nesterov, amsgrad and decoupled. `grads` are written only if `grad_scale` is
// given. `seed` turns on stochastic rounding. With `shapes`, parameters of any other shapes are refused.
// optim_step_cached also returns a tensor that owns the step (optim_step/cached_step.h). optim_step_again makes it once
// more, for parameters and states that lie where they did, or returns false, with nothing written, if the gradients do
// not fit it. With `check` it only says whether they do.
//
// optim_step_table takes the same arguments and writes nothing. It returns the table for GPU kernels, uint8 on the CPU,
// where its sections and launches begin (bind_table.cpp), and the step, for which optim_step_table_again writes the
// table of a further one into the same tensor.
//
// `rings` of the ring operators holds the ring of every tap, counted from 0, in the order of a contiguous kernel.
// joint_ring_prox, of all filters of each weight together, is only for GPUs. Its `rings` are those of all weights, one
// after another; `metrics` are empty or one for each weight.
//
// The block-sparse operators take activations of shape [batch, pixels, channels] with the channels of a pixel
// contiguous, and values of shape [blocks, groups, input channels of a group, output channels of a group]. The input
// gradient takes the pattern by input pixel: `rows` and `blocks` hold the output pixel and the block of each entry.
// block_sparse_by_pixel copies activations of any strides into this layout.
//
// Each part of mixed_conv2d has filters of one size and four entries of `pads`: above, below, left, right. Channel i of
// the result is computed by filter order[i], counted over all parts.
#define LOCO_STEP_ARGS                                                                                           \
  "int rule, bool[] flags, Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] states, Tensor(d!)[] steps, "   \
  "int[] first, Tensor hyper, int[] group_index, Tensor[] lrs, int[] lr_index, Tensor[] maps, int[] map_index, " \
  "Tensor[] penalties, int[] penalty_index, Tensor? grad_scale, Tensor? found_inf, int[] ordinals, int? seed, "  \
  "int rounding_step, Tensor? shapes"

#define LOCO_AGAIN_ARGS                                                                                         \
  "Tensor cached, Tensor(a!)[] grads, Tensor hyper, Tensor[] lrs, int[] lr_index, Tensor? grad_scale, Tensor? " \
  "found_inf, bool check"

inline void define_operators(torch::stable::detail::StableLibrary& m) {
  m.def("optim_step(" LOCO_STEP_ARGS ") -> ()");
  m.def("optim_step_cached(" LOCO_STEP_ARGS ") -> Tensor");
  m.def("optim_step_again(" LOCO_AGAIN_ARGS ") -> bool");
  m.def("optim_step_table(" LOCO_STEP_ARGS ") -> (Tensor, int[], Tensor)");
  m.def("optim_step_table_again(" LOCO_AGAIN_ARGS ") -> bool");
  m.def("ring_norms(Tensor weight, int[] rings, int count) -> Tensor");
  m.def(
      "ring_prox(Tensor weight, int[] rings, Tensor thresholds, Tensor? squared, Tensor? metric, bool linf) -> "
      "Tensor");
  m.def(
      "joint_ring_prox(Tensor[] weights, int[] rings, Tensor[] thresholds, Tensor[] squared, Tensor[] metrics, bool "
      "linf) -> Tensor[]");
  m.def("block_sparse_by_pixel(Tensor x) -> Tensor");
  m.def(
      "block_sparse_matmul(Tensor x, Tensor values, Tensor crow_indices, Tensor col_indices, Tensor? bias) -> Tensor");
  m.def(
      "block_sparse_input_gradient(Tensor grad, Tensor values, Tensor crow_indices, Tensor rows, Tensor blocks) -> "
      "Tensor");
  m.def(
      "block_sparse_value_gradient(Tensor x, Tensor grad, Tensor crow_indices, Tensor col_indices, int groups) -> "
      "Tensor");
  m.def(
      "mixed_conv2d(Tensor x, Tensor[] weights, Tensor[] biases, int[] pads, Tensor? order, int[] stride, int[] "
      "dilation, bool channels_last) -> Tensor");
}

#undef LOCO_STEP_ARGS
#undef LOCO_AGAIN_ARGS

// Register the operators' implementations for CUDA tensors.
namespace optim_step {
void implement_cuda(torch::stable::detail::StableLibrary& library);
}
namespace ring_prox {
void implement_cuda(torch::stable::detail::StableLibrary& library);
}

}  // namespace loco
