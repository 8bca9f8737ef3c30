"""The smaller network that gives the same outputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree

from loco_ext.sparsity.compaction import cost as costs
from loco_ext.sparsity.compaction.channels import Channels
from loco_ext.sparsity.compaction.describe import describe
from loco_ext.sparsity.compaction.layout import in_channels_last
from loco_ext.sparsity.compaction.norms import fold_norms as fold
from loco_ext.sparsity.compaction.report import Report
from loco_ext.sparsity.compaction.rewrite import Choose, Rewriter
from loco_ext.sparsity.compaction.trace import UntraceableError, trace
from loco_ext.sparsity.compaction.unmix import unmix
from loco_ext.sparsity.compaction.untraced import crop_modules

COSTS: dict[str, Choose] = {"measured": costs.fastest, "multiply_adds": costs.fewest_multiply_adds}
# Of the largest output: the two networks round differently.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}


def compact(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Any],
    *,
    cost: str = "measured",
    fold_norms: bool = True,
    fixed_size: bool = False,
) -> tuple[nn.Module, Report]:
    """A network without the kernels, rings and channels of ``model`` that are zero, with the same outputs in eval mode.

    Kernels are cropped to the block of taps that is not zero; channels that nothing reads, or that are the same number
    everywhere, are taken out of all layers that they go through, their numbers folded into the next layer's bias where
    that is exact at every size of the input; a residual block that adds nothing becomes the identity. What cannot be
    made smaller safely stays as it is, and the report says why. Gradients flow: the result can be trained on.

    Args:
        model: any module; left alone. Taken as in eval mode: what depends on ``training`` inside its own code (not
            inside modules of torch.nn) stays as in eval mode.
        example_inputs: a batch, or several arguments; the shapes and the device on which the result is to be fast.
        cost: "measured": kernels of several sizes in one layer become several convolutions, or one
            :func:`loco_ext.ops.mixed_conv2d`, where this is measured to be faster on the example, images are converted
            to channels_last on their way in, and back on their way out, where that is, and the model itself is returned
            if all this makes it slower; "multiply_adds": one convolution for each size, nothing is measured, the result
            is the same on every machine.
        fold_norms: batch normalisations that follow a convolution or linear layer go into its weights, by their running
            statistics; False where the result is to be trained on with them.
        fixed_size: constants that zero padding makes visible at borders become a map of biases, and the result takes
            inputs of the example's size alone.

    Returns:
        The network, a :class:`torch.fx.GraphModule`, and the report. A model that torch.fx cannot trace keeps its
        channels and its class; its kernels are cropped alone.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.

    Source:
        The draft "Optimal Convolutional Architectures Via Structured Sparsity Regularizers", sections 3.2 and 3.3.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from loco_ext import sparsity
        >>> model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3)).eval()
        >>> _ = model[0].weight.data[:6].zero_(), model[0].bias.data.zero_()
        >>> x = torch.randn(2, 1, 8, 8)
        >>> smaller, report = sparsity.compact(model, x, cost="multiply_adds")
        >>> smaller.get_submodule("0").weight.shape, torch.allclose(smaller(x), model(x), atol=1e-6)
        (torch.Size([2, 1, 3, 3]), True)
    """
    inputs = _check(model, example_inputs, cost)
    costs.forget()
    dense = _copy(_unwrapped(model)).eval()
    with torch.no_grad():
        expected = dense(*_copies(inputs))
    try:
        traced = trace(unmix(dense), inputs)
        if not _is_right(traced, inputs, expected):
            raise UntraceableError("the graph that torch.fx makes of it gives other outputs")
    except UntraceableError as error:
        results = _untraced(dense, inputs, COSTS[cost], str(error))
    else:
        results = _rewritten(traced, inputs, COSTS[cost], fixed_size, fold_norms)
    network, report = _select(dense, results, inputs, expected, measured=cost == "measured")
    report.parameters_before = sum(p.numel() for p in model.parameters())
    report.parameters_after = sum(p.numel() for p in network.parameters())
    training = {name: module.training for name, module in _unwrapped(model).named_modules()}
    for name, module in network.named_modules():
        module.training = training.get(name, model.training)
    return network, report


Result = tuple[nn.Module, Report]


def _rewritten(
    traced: fx.GraphModule, inputs: Sequence[Any], choose: Choose, fixed_size: bool, norms_folded: bool
) -> list[Result]:
    """The smaller network, perhaps in several versions, and last the model as it is."""
    same = _rewrite(traced, Channels(traced, keep_all=True), costs.as_it_is)
    if norms_folded:
        fold(traced)
    if choose is costs.fastest:
        traced = _in_faster_format(traced, inputs)
    plain = Channels(traced, fixed_size=fixed_size)
    scatter = plain.scatterable()
    versions = [Channels(traced, scatter, fixed_size), plain] if scatter else [plain]
    results: list[Result] = []
    for multiple in costs.MULTIPLES if choose is costs.fastest else (1,):
        changed = [channels.fill(multiple) for channels in versions]
        if any(changed) or not results:
            results = [*(_rewrite(traced, channels, choose) for channels in versions), *results]
    return [*results, same]


def _in_faster_format(traced: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """The graph, with images in channels_last memory format inside where what becomes of it is faster so."""
    other = in_channels_last(traced, inputs)
    if other is None:
        return traced
    networks = [_rewrite(graph, Channels(graph), costs.fastest)[0] for graph in (traced, other)]
    first, second = costs.latencies([partial(network, *inputs) for network in networks], _device(traced))
    return other if second < first else traced


def _rewrite(traced: fx.GraphModule, channels: Channels, choose: Choose) -> Result:
    rewriter = Rewriter(traced, channels, choose)
    return rewriter.build(), describe(channels, rewriter)


def _untraced(dense: nn.Module, inputs: Sequence[Any], choose: Choose, why: str) -> list[Result]:
    return [crop_modules(dense, inputs, choice, why) for choice in (choose, costs.as_it_is)]


def _select(dense: nn.Module, results: list[Result], inputs: Sequence[Any], expected: Any, measured: bool) -> Result:
    """The smaller network that is fastest or comes first; the model as it is where none is right and fast enough."""
    *smaller, same = results
    if not _is_right(same[0], inputs, expected):
        same = dense, same[1]
    right = [(network, report) for network, report in smaller if _is_right(network, inputs, expected)]
    if not right:
        return _kept(same, "the outputs of a smaller network would differ on the example")
    if not measured:
        return right[0]
    networks = [dense, *(network for network, _ in right)]
    first, *times = costs.latencies([partial(network, *inputs) for network in networks], _device(dense))
    latency, (network, report) = min(zip(times, right, strict=True), key=lambda pair: pair[0])
    if latency > first:
        network, report = _kept(same, f"a smaller network takes {latency / first:.3f} times as long on the example")
    report.latency_before, report.latency_after = first, min(latency, first)
    return network, report


def _kept(same: Result, why: str) -> Result:
    same[1].notes["model"] = f"it stays as it is: {why}"
    return same


def _is_right(network: nn.Module, inputs: Sequence[Any], expected: Any) -> bool:
    """Whether the network gives what is expected; not where it fails, say as it reads a layer's attributes."""
    try:
        with torch.no_grad():
            return _agree(network(*_copies(inputs)), expected)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        return False


def _agree(results: Any, expected: Any) -> bool:
    """Whether all tensors are equal but for rounding, which grows with the largest of a tensor's numbers."""
    pairs = zip(_pytree.tree_leaves(results), _pytree.tree_leaves(expected), strict=True)
    return all(_equal(x, y) for x, y in pairs if isinstance(y, Tensor))


def _equal(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if y.dtype not in _TOLERANCES:
        return torch.equal(x, y)
    scale = y[y.isfinite()].abs().max().item() if y.isfinite().any() else 0.0
    return torch.allclose(x, y, rtol=0, atol=_TOLERANCES[y.dtype] * scale, equal_nan=True)


def _copy(model: nn.Module) -> nn.Module:
    """A deep copy; tensors that were computed, as weights are by hooks, are copied without their history."""
    held = (x for module in model.modules() for x in _pytree.tree_leaves(vars(module)))
    memo = {id(x): x.detach().clone() for x in held if isinstance(x, Tensor) and not x.is_leaf}
    return copy.deepcopy(model, memo)


def _copies(inputs: Sequence[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in inputs]


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside what torch.compile or a parallel wrapper has made of it."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return _unwrapped(model.module)
    inner = getattr(model, "_orig_mod", None)
    return model if inner is None else _unwrapped(inner)


def _check(model: nn.Module, example_inputs: Any, cost: str) -> Sequence[Any]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a module, got {type(model).__name__}")
    if cost not in tuple(COSTS):
        raise ValueError(f"cost: expected 'measured' or 'multiply_adds', got {cost!r}")
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    if not isinstance(inputs, tuple | list) or not any(isinstance(x, Tensor) for x in inputs):
        raise TypeError(f"example_inputs: expected a tensor, or a tuple with one, got {type(example_inputs).__name__}")
    return inputs
