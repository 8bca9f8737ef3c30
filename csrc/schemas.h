// The schemas of all operators.
#pragma once

#include <torch/csrc/stable/library.h>

namespace loco {

// Shared by the optim_step operators: `group_index` names each parameter's row of `hyper`, `map_index` its entry of
// `maps` (-1: uniform decay), `lr_index` each row's entry of `lrs` (-1, or no entries at all: the row has its learning
// rate). `grads` are written only where `grad_scale` is given; `seed` rounds stochastically.
//
// The number that ring_penalty_hold returns stands for a penalty until release of the library that made it.
// `penalties` has one for each parameter (0: none), or no entries at all; `like` is any tensor on the device of these
// parameters.
//
// The ring operators take the ring of every tap, counted from 0, in the order of a contiguous kernel.
//
// Activations of the block-sparse operators are [batch, pixels, channels], the channels of a pixel side by side, and
// values [blocks, groups, channels of a group in, channels of a group out]. The input gradient takes the pattern by
// input pixel: its entries' output pixels and blocks. by_pixel copies activations of any strides to where they are so.
//
// Parts of mixed_conv2d have kernels of one size each, and four pads: above, below, left, right. Channel i of the
// result is that of kernel order[i], counted over all parts.
inline void define_operators(torch::stable::detail::StableLibrary& m) {
  m.def(
      "optim_step_sgd("
      "Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] momentum_buffers, int[] first, int[] group_index, "
      "Tensor hyper, Tensor[] lrs, int[] lr_index, Tensor[] maps, int[] map_index, int[] penalties, "
      "bool nesterov, bool maximize, bool l1, "
      "Tensor? grad_scale, Tensor? found_inf, int[] ordinals, int? seed, int rounding_step) -> ()");
  m.def(
      "optim_step_adam("
      "Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
      "Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] steps, int[] group_index, "
      "Tensor hyper, Tensor[] lrs, int[] lr_index, Tensor[] maps, int[] map_index, int[] penalties, "
      "bool amsgrad, bool maximize, bool decoupled, bool l1, "
      "Tensor? grad_scale, Tensor? found_inf, int[] ordinals, int? seed, int rounding_step) -> ()");
  m.def(
      "ring_penalty_hold("
      "Tensor like, int[] rings, Tensor thresholds, Tensor? squared, bool linf, bool coupled) -> int");
  m.def("ring_norms(Tensor weight, int[] rings, int count) -> Tensor");
  m.def(
      "ring_prox(Tensor weight, int[] rings, Tensor thresholds, Tensor? squared, Tensor? metric, bool linf) -> "
      "Tensor");
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
      "dilation, Tensor? add, bool relu, bool channels_last) -> Tensor");
}

}  // namespace loco
