"""The smaller network that gives the same outputs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree

from loco_ext.sparsity.compaction import cost as costs
from loco_ext.sparsity.compaction.agreement import Pair, copies, is_right
from loco_ext.sparsity.compaction.channels import Channels
from loco_ext.sparsity.compaction.constant_channels import without_constant_channels
from loco_ext.sparsity.compaction.describe import describe
from loco_ext.sparsity.compaction.further import further_pairs
from loco_ext.sparsity.compaction.layout import in_channels_last
from loco_ext.sparsity.compaction.norms import fold_norms as fold
from loco_ext.sparsity.compaction.report import Report
from loco_ext.sparsity.compaction.rewrite import Choose, Rewriter
from loco_ext.sparsity.compaction.trace import UntraceableError, trace
from loco_ext.sparsity.compaction.unmix import unmix
from loco_ext.sparsity.compaction.untraced import crop_modules
from loco_ext.sparsity.computed import make_weights_plain

_log = logging.getLogger(__name__)
COSTS: dict[str, Choose] = {"measured": costs.fastest, "multiply_adds": costs.fewest_multiply_adds}


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
    that is exact at every size of the input; a layer normalisation over such channels reads the others alone, and its
    weights are folded into the layers that read it; a residual block that adds nothing becomes the identity. What
    cannot be made smaller safely stays as it is, and the report says why. Gradients flow: the result can be trained on.

    Weights that torch's parametrizations, or the hooks of its weight_norm, spectral_norm and prune, compute become
    parameters with their values in eval mode: filters that are masked go as those that are zero do.

    Sizes are those that hold for every input that the model takes, not the example's. The result is compared with the
    model on the example and on two further batch sizes and sizes that the model takes, with numbers drawn from it.

    Args:
        model: any module; left alone. Taken as in eval mode: what depends on ``training`` inside its own code (not
            inside modules of torch.nn) stays as in eval mode.
        example_inputs: a batch, or several arguments; the shapes and the device on which the result is to be fast. The
            result takes other sizes, as the model does, but as many dimensions: no image without a batch after a batch.
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
        expected = dense(*copies(inputs))
    make_weights_plain(dense)
    example = Pair(dense, list(inputs), expected)
    further = further_pairs(dense, inputs, batch_alone=fixed_size)
    same: Callable[[], Result]
    try:
        traced = trace(unmix(dense), inputs)
        if not is_right(traced, [example, *further]):
            raise UntraceableError("the graph that torch.fx makes of it gives other outputs")
    except UntraceableError as error:
        smaller = [_untraced(dense, inputs, COSTS[cost], str(error))]
        same = partial(_untraced, dense, inputs, costs.as_it_is, str(error))
    else:
        smaller = _rewritten(traced, example, COSTS[cost], fixed_size, fold_norms)
        same = partial(_as_it_is, dense, inputs)
    network, report = _select(dense, smaller, same, example, further, measured=cost == "measured")
    report.parameters_before = sum(p.numel() for p in model.parameters())
    report.parameters_after = sum(p.numel() for p in network.parameters())
    training = {name: module.training for name, module in _unwrapped(model).named_modules()}
    for name, module in network.named_modules():
        module.training = training.get(name, model.training)
    return network, report


Result = tuple[nn.Module, Callable[[], Report]]  # a network, and what writes the report on it
Version = tuple[fx.GraphModule, Channels, Result]  # a graph, its analysis and what becomes of it


def _rewritten(
    traced: fx.GraphModule, example: Pair, choose: Choose, fixed_size: bool, norms_folded: bool
) -> list[Result]:
    """The smaller network, and others that may take its place; the fastest comes first where time is measured."""
    if norms_folded:
        fold(traced)
    if choose is not costs.fastest:
        narrow = without_constant_channels(traced, example.inputs)
        graphs = [traced] if narrow is None else [narrow, traced]
        return [result for graph in graphs for result in _versions(_version(graph, fixed_size, choose), choose)[1]]
    version = _version(traced, fixed_size, choose)
    for other in (in_channels_last, without_constant_channels):
        version = _faster(version, other(version[0], example.inputs), example)
    traced = version[0]
    versions, results = _versions(version, choose)
    best = _fastest(results, example)
    if best is None:
        return results
    channels = versions[results.index(best)]
    filled = [_rewrite(traced, channels, choose) for multiple in costs.MULTIPLES if channels.fill(multiple)]
    best = _fastest([best, *filled], example) if filled else best
    return results if best is None else [best, *results]


def _fastest(results: list[Result], example: Pair) -> Result | None:
    """Of those that are right; None where none is."""
    right = [result for result in results if is_right(result[0], [example])]
    if len(right) < 2:
        return right[0] if right else None
    times = _latencies([network for network, _ in right], example.inputs, costs.A_GLANCE)
    return right[times.index(min(times))]


def _version(traced: fx.GraphModule, fixed_size: bool, choose: Choose) -> Version:
    channels = Channels(traced, fixed_size=fixed_size)
    return traced, channels, _rewrite(traced, channels, choose)


def _versions(version: Version, choose: Choose) -> tuple[list[Channels], list[Result]]:
    """Of a graph with sums into which an operand is scattered, where there are such sums, and without."""
    traced, plain, first = version
    scatter = plain.scatterable()
    if not scatter:
        return [plain], [first]
    scattered = Channels(traced, scatter, plain.fixed_size)
    return [scattered, plain], [_rewrite(traced, scattered, choose), first]


def _faster(version: Version, graph: fx.GraphModule | None, example: Pair) -> Version:
    """The version, or the one of another graph if there is one that is right and faster."""
    if graph is None:
        return version
    other = _version(graph, version[1].fixed_size, costs.fastest)
    return other if _fastest([version[2], other[2]], example) is other[2] else version


def _rewrite(traced: fx.GraphModule, channels: Channels, choose: Choose) -> Result:
    rewriter = Rewriter(traced, channels, choose)
    return rewriter.build(), partial(describe, channels, rewriter)


def _as_it_is(dense: nn.Module, inputs: Sequence[Any]) -> Result:
    traced = trace(unmix(dense), inputs)
    return _rewrite(traced, Channels(traced, keep_all=True), costs.as_it_is)


def _untraced(dense: nn.Module, inputs: Sequence[Any], choose: Choose, why: str) -> Result:
    network, report = crop_modules(dense, inputs, choose, why)
    return network, lambda: report


def _select(
    dense: nn.Module,
    smaller: list[Result],
    same: Callable[[], Result],
    example: Pair,
    further: Sequence[Pair],
    measured: bool,
) -> tuple[nn.Module, Report]:
    """The first smaller network that is right; the model as it is where there is none, or where it is not faster.

    What was chosen as the fastest of several is in part the luckiest: it and the model are measured anew.
    """
    able = [result for result in smaller if is_right(result[0], [example])]
    right = next((result for result in able if is_right(result[0], further)), None)
    why = f"the outputs of a smaller network would differ on {'inputs of other sizes' if able else 'the example'}"
    before = after = None
    if right is not None and measured:
        before, after = _latencies([dense, right[0]], example.inputs, costs.A_LOOK)
        if after > before:
            why = f"a smaller network takes {after / before:.3f} times as long on the example"
            right, after = None, before
    network, report = same() if right is None else right
    described = report()
    if right is None:
        described.notes["model"] = f"it stays as it is: {why}"
        network = network if is_right(network, [example, *further]) else dense
    described.latency_before, described.latency_after = before, after
    return network, described


def _latencies(networks: Sequence[nn.Module], inputs: Sequence[Any], budget: float) -> list[float]:
    _log.info("timing %d versions of the network, %g seconds", len(networks), budget)
    return costs.latencies([partial(network, *inputs) for network in networks], _device(networks[0]), budget)


def _copy(model: nn.Module) -> nn.Module:
    """A deep copy; tensors that were computed, as weights are by hooks, are copied without their history."""
    held = (x for module in model.modules() for x in _pytree.tree_leaves(vars(module)))
    memo = {id(x): x.detach().clone() for x in held if isinstance(x, Tensor) and not x.is_leaf}
    return copy.deepcopy(model, memo)


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
