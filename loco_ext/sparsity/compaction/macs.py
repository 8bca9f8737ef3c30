"""The MACs of a whole model, whatever computes them: torch counts its operators, and this module this package's."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import _C, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from loco_ext.ops import backends
from loco_ext.sparsity.compaction.graph import copies
from loco_ext.sparsity.compaction.roles import CONVOLUTIONS
from loco_ext.sparsity.compaction.whole_filters import TRANSPOSED


def macs_of(model: nn.Module, inputs: Sequence[Any]) -> Fraction:
    """Return the multiply-accumulates of one call, for one sample.

    Raises:
        Exception: torch cannot count one of the operators.
    """
    from torch.utils.flop_counter import FlopCounterMode  # takes a while to import

    own, ops = {}, torch.ops.loco_ext
    if backends.library is not None:
        own = {ops.block_sparse_matmul: _of_blocks, ops.mixed_conv2d: _of_mixed_conv2d}
    shapes = [x.shape for x in inputs if isinstance(x, Tensor)]
    samples, rank = samples_in(shapes), max(map(len, shapes))

    def look(module: Any, arguments: tuple[Any, ...]) -> None:
        nonlocal samples
        if any(isinstance(x, Tensor) and x.dim() == rank < module.weight.dim() for x in arguments[:1]):
            samples = 1  # the example is an image, or a vector, without a batch

    layers = (module for module in model.modules() if type(module) in (*CONVOLUTIONS, *TRANSPOSED, nn.Linear))
    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(look))
        with _in_counted_operators(model), FlopCounterMode(display=False, custom_mapping=own) as counter:
            model(*copies(inputs))
    return Fraction(counter.get_total_flops(), 2 * samples)


@contextmanager
def _in_counted_operators(model: nn.Module) -> Iterator[None]:
    """Let attention and recurrent layers call matrix products, as torch does not count those of their fused operators.

    For recurrent layers oneDNN and cuDNN are switched off, which makes convolutions slow, but their count is the same.
    """
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    fast, one_dnn, cudnn = torch.backends.mha.get_fastpath_enabled(), _C._get_mkldnn_enabled(), _C._get_cudnn_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        # The contexts flags() of torch.backends would change settings of precision, too, and its attributes may be
        # frozen.
        _C._set_mkldnn_enabled(one_dnn and not recurrent)
        _C._set_cudnn_enabled(cudnn and not recurrent)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        _C._set_mkldnn_enabled(one_dnn)
        _C._set_cudnn_enabled(cudnn)


def samples_in(shapes: Sequence[Sequence[int]]) -> int:
    """Return the number of samples of a call whose tensors have these shapes: the first size of the first."""
    return max(1, next((shape[0] for shape in shapes if len(shape) > 0), 1))


def _of_blocks(x_shape: Sequence[int], values_shape: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * x_shape[0] * prod(values_shape)


def _of_mixed_conv2d(_: Sequence[int], weights: Sequence[Sequence[int]], *__: Any, out_shape: Sequence[int]) -> int:
    pixels = prod(out_shape) // sum(shape[0] for shape in weights)  # of all samples
    return 2 * pixels * sum(map(prod, weights))
