"""Convolutions of a model beside what follows and precedes them, as torch.fx sees it."""

from __future__ import annotations

from collections import Counter

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from loco_ext.sparsity.penalties import FoldedPenalty, KernelPenalty, Penalty, RingPenalty


def traced(model: nn.Module) -> fx.GraphModule:
    """The model's graph, on its own modules.

    Raises:
        ValueError: torch.fx cannot trace the model.
    """
    try:
        return fx.symbolic_trace(model)
    except Exception as error:
        raise ValueError(f"model: expected one that torch.fx can trace, got {type(error).__name__}: {error}") from error


def is_convolution(module: nn.Module) -> bool:
    """Whether kernels lie along the first axis of its weight."""
    return isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd)


def convolution_of(graph: nn.Module, node: fx.Node) -> _ConvNd | None:
    """The Conv module that the node calls; None if it calls anything else."""
    module = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
    return module if isinstance(module, _ConvNd) and is_convolution(module) else None


def folded_penalties(model: nn.Module, penalty: RingPenalty | KernelPenalty) -> dict[str, Penalty]:
    """A penalty for each Conv module that the model runs: a :class:`FoldedPenalty` where its output goes to one batch
    norm and nowhere else, otherwise ``penalty`` itself.

    Args:
        model: one that torch.fx can trace; it is not run.
        penalty: for all of them.

    Returns:
        Module names to penalties, as :func:`loco_ext.optim.parameter_groups` takes them.

    Raises:
        ValueError: torch.fx cannot trace the model.

    Example:
        >>> from torch import nn
        >>> from loco_ext import optim, sparsity
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 5), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> penalties = sparsity.folded_penalties(model, sparsity.RingPenalty(1e-3))
        >>> [(name, type(penalty).__name__) for name, penalty in penalties.items()]
        [('0', 'FoldedPenalty'), ('3', 'RingPenalty')]
        >>> optimizer = optim.SGD(optim.parameter_groups(model, 5e-4, penalty=penalties), lr=0.1)
    """
    graph = traced(model)
    called = {node: module for node in graph.graph.nodes if (module := convolution_of(graph, node)) is not None}
    uses = Counter(id(module.weight) for module in called.values())
    found: dict[str, Penalty] = {}
    for node, module in called.items():
        norm = _batch_norm_after(graph, node) if uses[id(module.weight)] == 1 else None
        found[str(node.target)] = penalty if norm is None else FoldedPenalty(penalty, norm)
    return found


def _batch_norm_after(graph: fx.GraphModule, node: fx.Node) -> _BatchNorm | None:
    """The batch norm, with running statistics, that alone takes the node's output."""
    (user, *others) = node.users
    module = None if others or user.op != "call_module" else graph.get_submodule(str(user.target))
    return module if isinstance(module, _BatchNorm) and module.running_var is not None else None
