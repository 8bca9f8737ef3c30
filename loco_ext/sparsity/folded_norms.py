"""Penalties of convolutions with the batch norms behind them, and removal of filters that a norm multiplies by zero."""

from collections import Counter

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from loco_ext.argument_checks import check_module
from loco_ext.fx.modules import count_owners
from loco_ext.fx.operations import module_of, only_user, reads_numbers, stored_tensor
from loco_ext.fx.trace import trace
from loco_ext.nn.computed import check_plain, check_plain_weight, computed, is_convolution
from loco_ext.penalties import FoldedPenalty, GroupPenalty


def convolution_of(node: fx.Node) -> _ConvNd | None:
    """Return the Conv module that the node calls; None if it calls anything else."""
    module = module_of(node)
    return module if isinstance(module, _ConvNd) and is_convolution(module) else None


def folded_penalties(model: nn.Module, penalty: GroupPenalty) -> dict[str, GroupPenalty | FoldedPenalty]:
    """Return a penalty for each Conv module that the model runs.

    It is a :class:`FoldedPenalty` if the convolution's output goes to one batch norm, with a weight and running
    statistics, and nowhere else. Otherwise it is ``penalty`` itself.

    Args:
        model: a model that torch.fx can trace; it is not run.
        penalty: the penalty for all of them.

    Returns:
        Penalties by module name, as :func:`loco_ext.optim.parameter_groups` takes them.

    Raises:
        TypeError, ValueError: the message names the argument; torch.fx cannot trace the model, or a parametrization or
            a hook computes one of its weights.

    Example:
        >>> from torch import nn
        >>> from loco_ext import optim, sparsity
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 5), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> penalties = sparsity.folded_penalties(model, sparsity.RingPenalty(1e-3))
        >>> [(name, type(penalty).__name__) for name, penalty in penalties.items()]
        [('0', 'FoldedPenalty'), ('3', 'RingPenalty')]
        >>> optimizer = optim.SGD(optim.parameter_groups(model, 5e-4, penalty=penalties), lr=0.1)
    """
    check_plain(model)
    if not isinstance(penalty, GroupPenalty):
        raise TypeError(f"penalty: expected a RingPenalty or a KernelPenalty, got {penalty!r}")
    return {
        name: penalty if norm is None else FoldedPenalty(penalty, norm)
        for name, (_, norm) in convolutions_and_norms(model).items()
    }


@torch.no_grad()
def zero_dead_filters(model: nn.Module) -> int:
    """Set to zero, in place, each filter that the batch norm behind its convolution multiplies by zero.

    A :class:`FoldedPenalty` removes a filter by a zero in the norm's weight and keeps the filter's direction, so that
    training can bring it back. After training, this function clears the weights as well. The model's outputs stay the
    same, and functions that only look at the convolutions, such as :func:`kernel_sizes`, see the remaining filters. In
    further training, cleared filters would stay zero.

    Args:
        model: a model that torch.fx can trace; it is not run.

    Returns:
        The number of filters whose norm multiplies them by zero.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: torch.fx cannot trace the model, or a parametrization or a hook computes a weight that has such
            filters; nothing has changed then.

    Example:
        >>> import torch
        >>> from loco_ext import sparsity
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 5, bias=False), torch.nn.BatchNorm2d(4))
        >>> model[1].weight.data[:3] = 0.0
        >>> sparsity.zero_dead_filters(model), sparsity.kernel_sizes(model[0].weight)
        (3, tensor([0, 0, 0, 5]))
    """
    check_module("model", model)
    dead = {
        name: (convolution, norm.weight == 0)
        for name, (convolution, norm) in convolutions_and_norms(model).items()
        if norm is not None
    }
    for name, (convolution, filters) in dead.items():
        if filters.any():
            check_plain_weight(name, convolution)
    for convolution, filters in dead.values():
        if filters.any():
            convolution.weight[filters.to(convolution.weight.device)] = 0.0
    return sum(int(filters.sum()) for _, filters in dead.values())


def convolutions_and_norms(model: nn.Module) -> dict[str, tuple[_ConvNd, _BatchNorm | None]]:
    """Return each Conv module that the model runs, by name, with its batch norm.

    The batch norm has a weight and running statistics and takes the output of this convolution only, whose weight
    nothing else reads; None if there is none.

    Raises:
        ValueError: torch.fx cannot trace the model.
    """
    if isinstance(model, _ConvNd) and is_convolution(model):  # torch.fx would trace inside it
        return {"": (model, None)}
    graph = trace(model)
    called = {node: module for node in graph.graph.nodes if (module := convolution_of(node)) is not None}
    weights = Counter(map(_owner, called.values()))
    readers = count_owners(graph)
    for node in graph.graph.nodes:
        if node.op == "get_attr" and any(map(reads_numbers, node.users)):
            readers[id(stored_tensor(node))] += 1
    modules = Counter(id(module_of(node)) for node in graph.graph.find_nodes(op="call_module"))
    found: dict[str, tuple[_ConvNd, _BatchNorm | None]] = {}
    for node, module in called.items():
        norm = _batch_norm_after(node)
        alone = weights[_owner(module)] == 1 and readers[_owner(module)] <= 1
        found[str(node.target)] = module, norm if alone and modules[id(norm)] == 1 else None
    return found


def _owner(module: _ConvNd) -> int:
    """Return an id that is equal for modules that share a weight: that of the weight, or of the module computing it."""
    return id(module.weight if computed(module) is None else module)


def _batch_norm_after(node: fx.Node) -> _BatchNorm | None:
    """Return the batch norm, with weight and running statistics, that is the only user of the node, or None."""
    user = only_user(node)
    module = None if user is None else module_of(user)
    if not isinstance(module, _BatchNorm) or module.running_var is None or module.weight is None:
        return None
    return module
