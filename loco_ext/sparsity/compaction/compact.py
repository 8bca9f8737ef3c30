"""Compaction of a network to a smaller one with the same outputs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import UninitializedParameter

from loco_ext.argument_checks import check_choice, check_module
from loco_ext.errors import first_line
from loco_ext.fx.branches import BranchError, same_as_on_example
from loco_ext.fx.modules import copied, unwrapped
from loco_ext.fx.trace import UntraceableError
from loco_ext.nn.computed import make_weights_plain
from loco_ext.optim.sharding import is_sharded
from loco_ext.sparsity.compaction import cost as costs
from loco_ext.sparsity.compaction.agreement import Pair, is_right, results_of
from loco_ext.sparsity.compaction.channels import Channels, analyse
from loco_ext.sparsity.compaction.channels_last import in_channels_last
from loco_ext.sparsity.compaction.compaction_report import Report
from loco_ext.sparsity.compaction.constant_channels import without_constant_channels
from loco_ext.sparsity.compaction.describe import describe
from loco_ext.sparsity.compaction.fallback import crop_modules
from loco_ext.sparsity.compaction.graph import annotated_graph, copies
from loco_ext.sparsity.compaction.macs import macs_of
from loco_ext.sparsity.compaction.norms import fold_norms as fold
from loco_ext.sparsity.compaction.other_sizes import pairs_of_other_sizes
from loco_ext.sparsity.compaction.rewrite import Choose, Rewriter
from loco_ext.sparsity.compaction.split_mixed_convs import split_mixed_convs
from loco_ext.sparsity.compaction.views import ROWS
from loco_ext.sparsity.former_names import present_name

Candidate = tuple[nn.Module, Report]  # a smaller network and the report on it
COSTS: dict[str, Choose] = {"measured": costs.fastest, "macs": costs.fewest_macs}


@torch.inference_mode(False)  # the result is for training, whatever mode the caller is in
def compact(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Any],
    *,
    cost: str = "measured",
    fold_norms: bool = True,
    fixed_size: bool = False,
) -> tuple[nn.Module, Report]:
    """Return a network without the zero filters, rings and channels of ``model``, with the same outputs in eval mode.

    - *Filters* are cropped to the block of taps that is not zero.
    - *Channels* that nothing reads, or that are constant everywhere, are removed from all layers that they go through.
      Their constants are folded into the next layer's bias where that is exact for every size of the input.
    - *Layer normalisations* over constant channels read only the others. Their weights are folded into the layers that
      read them.
    - *Residual blocks* that add nothing become the identity.
    - *Computed weights* become parameters with their values in eval mode, if torch's parametrizations or the hooks of
      its weight_norm, spectral_norm and prune compute them, or code that computes a convolution's weight from
      parameters alone. Masked filters are removed like filters of zeros.

    What cannot be made smaller safely is kept, and the report says why. Gradients flow, so the result can be trained
    further.

    Inferred sizes hold for every input that the model accepts, not only for the example. The result is compared with
    the model on the example, and on inputs of two other batch sizes and two other sizes that the model accepts, with
    values drawn from the example. If the model's code branches on sizes, the result takes the example's branches and
    raises ValueError for inputs of sizes that would take others.

    Args:
        model: any module; it is not changed. It is compacted as in eval mode: code of its own that depends on
            ``training`` (outside of torch.nn's modules) keeps the behaviour of eval mode.
        example_inputs: a batch, or several arguments, with the shapes and the device for which the result is optimized.
            Like the model, the result accepts other sizes, but only the same number of dimensions: an image without a
            batch dimension is not accepted if the example has one.
        cost: with ``"measured"``, filters of several sizes in one layer become several convolutions, or one
            :func:`loco_ext.ops.mixed_conv2d`, where this is measured to be faster on the example. Images are converted
            to channels_last at the input, and back at the output, where that is faster. If all this makes the model
            slower, the model itself is returned. With ``"macs"``, there is one convolution for each size. Nothing is
            measured, and the result is the same on every machine.
        fold_norms: whether batch and instance normalisations that follow a convolution or linear layer are folded into
            its weights, using their running statistics; False keeps them for further training.
        fixed_size: whether constants that zero padding makes visible at borders become a map of biases; the result then
            accepts only inputs of the example's size.

    Returns:
        The network, a :class:`torch.fx.GraphModule`, and the report. A model that torch.fx cannot trace keeps its
        channels and its class; only its filters are cropped.

    Raises:
        TypeError, ValueError: the message names the argument, what was expected and what it got.

    Source:
        The draft "Optimal Convolutional Architectures Via Structured Sparsity Regularizers", sections 3.2 and 3.3.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from loco_ext import sparsity
        >>> model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3)).eval()
        >>> _ = model[0].weight.data[:6].zero_(), model[0].bias.data.zero_()
        >>> x = torch.randn(2, 1, 8, 8)
        >>> smaller, report = sparsity.compact(model, x, cost="macs")
        >>> smaller.get_submodule("0").weight.shape, torch.allclose(smaller(x), model(x), atol=1e-6)
        (torch.Size([2, 1, 3, 3]), True)
    """
    cost = present_name(cost) if isinstance(cost, str) else cost
    return compacted(model, check_inputs(model, example_inputs), cost, fold_norms, fixed_size)


def compacted(
    model: nn.Module,
    inputs: Sequence[Any],
    cost: str = "measured",
    fold_norms: bool = True,
    fixed_size: bool = False,
    may_stay: bool = True,
) -> tuple[nn.Module, Report]:
    """Do as :func:`compact`; unless the model ``may_stay``, a smaller network is returned though it is not faster."""
    check_choice("cost", cost, tuple(COSTS))
    costs.clear_timings()
    dense = copied(unwrapped(model)).eval()
    expected = results_of(dense, inputs)
    make_weights_plain(dense)
    example = Pair(dense, list(inputs), expected)
    others = pairs_of_other_sizes(dense, inputs, batch_alone=fixed_size)
    choose, refused = COSTS[cost], ""
    try:
        graph = annotated_graph(split_mixed_convs(dense), inputs)
        others, refused = _by_branches(graph, others)
        if not is_right(graph, [example, *others]):
            raise UntraceableError("the graph that torch.fx makes of it gives other outputs")
    except UntraceableError as error:
        why = str(error).replace("model: expected one that torch.fx can trace, got", "torch.fx cannot trace it:")
        smaller: Iterable[Candidate] = [crop_modules(dense, inputs, choose, why)]
        unchanged = partial(crop_modules, dense, inputs, costs.as_it_is, why)
    else:
        if fold_norms:
            fold(graph)
        smaller = (_by_time if cost == "measured" else _by_count)(graph, example, choose, fixed_size)
        unchanged = partial(_whole, dense, inputs)
    network, report = _select(smaller, unchanged, example, others, measured=cost == "measured" and may_stay)
    if refused:
        report.notes["branches"] = f"the result refuses some inputs that the model accepts: {refused}"
    try:
        report.macs_elsewhere = max(0, round(macs_of(dense, inputs)) - report.macs_before)
    except Exception as error:  # torch's formulas of operators have conditions of their own
        report.notes["MACs"] = f"those outside of these layers are not counted: {first_line(error)}"
    report.parameters_before = sum(p.numel() for p in model.parameters())
    report.parameters_after = sum(p.numel() for p in network.parameters())
    take_modes(network, model)
    return network, report


def _by_branches(graph: fx.GraphModule, pairs: Sequence[Pair]) -> tuple[list[Pair], str]:
    """Return the pairs for which the model's code takes the same branches as in its graph, and why not all are left."""
    if not (checks := graph.graph.find_nodes(op="call_function", target=same_as_on_example)):
        return list(pairs), ""
    left, why = [], ""
    if any(check.args[2] == ROWS for check in checks):  # perhaps of none of the sizes that were tried
        why = f"images of other sizes, whose rows in {ROWS} are no samples"
    for pair in pairs:
        try:
            with torch.no_grad():
                graph.forward(*copies(pair.inputs))
        except BranchError as error:
            why = str(error)
            continue
        except Exception:  # the comparison with the model's results finds what is wrong
            pass
        left.append(pair)
    return left, why


def take_modes(network: nn.Module, model: nn.Module) -> None:
    """Set the training mode of a network's modules to that of the model's modules of the same names, or around them."""
    modes = {name: module.training for name, module in unwrapped(model).named_modules()}
    for name, module in network.named_modules():
        while name not in modes:
            name = name.rpartition(".")[0]
        module.training = modes[name]


def _of_graph(channels: Channels, choose: Choose) -> Candidate:
    """Return the network that has the channels that are needed."""
    rewriter = Rewriter(channels, choose)
    network = rewriter.build()
    return network, describe(channels, rewriter)


def _scattered(channels: Channels, choose: Choose) -> list[Candidate]:
    """Return the network with sums of terms that have fewer channels than others, if the graph has such sums."""
    scatter = channels.scatterable()
    return [_of_graph(analyse(channels.graph, scatter, channels.fixed_size), choose)] if scatter else []


def _by_count(graph: fx.GraphModule, example: Pair, choose: Choose, fixed_size: bool) -> Iterator[Candidate]:
    """Yield smaller networks, the one with the fewest MACs first."""
    narrow = without_constant_channels(graph, example.inputs)
    for each in [graph] if narrow is None else [narrow, graph]:
        channels = analyse(each, fixed_size=fixed_size)
        yield from _scattered(channels, choose)
        yield _of_graph(channels, choose)


def _by_time(graph: fx.GraphModule, example: Pair, choose: Choose, fixed_size: bool) -> list[Candidate]:
    """Return smaller networks, the fastest first; each further way to compute the model is kept if it is faster."""
    channels = analyse(graph, fixed_size=fixed_size)
    plain = _of_graph(channels, choose)
    for convert in (in_channels_last, without_constant_channels):
        other = convert(channels.graph, example.inputs)
        if other is not None:
            others = analyse(other, fixed_size=fixed_size)
            found = _of_graph(others, choose)
            if _fastest([plain, found], example) is found:
                plain, channels = found, others
    candidates = [*_scattered(channels, choose), plain]
    best = _fastest(candidates, example)
    return candidates if best is None else [best, *candidates]


def _fastest(candidates: list[Candidate], example: Pair) -> Candidate | None:
    """Return the fastest of the networks with the right outputs; None if there is none."""
    right = [each for each in candidates if is_right(each[0], [example])]
    if len(right) < 2:
        return right[0] if right else None
    times = costs.latencies([network for network, _ in right], example.inputs, costs.SHORT_TIMING)
    return right[times.index(min(times))]


def _whole(dense: nn.Module, inputs: Sequence[Any]) -> Candidate:
    """Return the model with all channels and taps, as a graph.

    A model that has graphs itself stays as it is: they may call ``mixed_conv2d``, which the new graph would not.
    """
    whole = _of_graph(analyse(annotated_graph(split_mixed_convs(dense), inputs), keep_all=True), costs.as_it_is)
    has_graphs = any(isinstance(module, fx.GraphModule) for module in dense.modules())
    return (dense, whole[1]) if has_graphs else whole


def _select(
    smaller: Iterable[Candidate],
    unchanged: Callable[[], Candidate],
    example: Pair,
    others: Sequence[Pair],
    measured: bool,
) -> tuple[nn.Module, Report]:
    """Return the first smaller network that is right; the model as it is if there is none, or if it is not faster.

    The network was selected as the fastest of several, partly by chance, so it and the model are timed again.
    """
    dense = example.model
    right, why = None, "the outputs of a smaller network would differ on the example"
    for each in smaller:
        if is_right(each[0], [example]):
            why = "the outputs of a smaller network would differ on inputs of other sizes"
            if is_right(each[0], others):
                right = each
                break
    before = after = None
    if right is not None and measured:
        before, after = costs.latencies([dense, right[0]], example.inputs, costs.LONG_TIMING)
        if after > before:
            why = f"a smaller network takes {after / before:.3f} times as long on the example"
            right, after = None, before
    network, report = unchanged() if right is None else right
    if right is None:
        report.notes["model"] = f"it stays as it is: {why}"
        network = network if is_right(network, [example, *others]) else dense
    report.latency_before, report.latency_after = before, after
    return network, report


def check_inputs(model: nn.Module, example_inputs: Any) -> Sequence[Any]:
    """Return the arguments for one call of the model.

    Raises:
        TypeError: they are none; the model is not a module, or has sharded parameters.
        ValueError: it has parameters that are not initialised yet.
    """
    check_module("model", model)
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise ValueError("model: expected initialised parameters, got lazy ones; run the model once")
    if any(map(is_sharded, model.parameters())):
        raise TypeError(
            "model: expected parameters that are whole, got sharded ones; get_model_state_dict of torch.distributed "
            "gathers them with full_state_dict=True, for another model to load"
        )
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    if not isinstance(inputs, tuple | list) or not any(isinstance(x, Tensor) for x in inputs):
        got = kind = type(example_inputs).__name__
        if isinstance(inputs, tuple | list):
            kinds = ", ".join(dict.fromkeys(type(x).__name__ for x in inputs))
            got = f"a {kind} of {kinds}" if kinds else f"an empty {kind}"
        raise TypeError(f"example_inputs: expected a tensor, or a tuple with one, got {got}")
    return inputs
