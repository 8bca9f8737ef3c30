"""Numbers of paths from a network's outputs to its inputs."""

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from loco_ext import compiler
from loco_ext.argument_checks import check_ints, check_module
from loco_ext.fx.modules import device_of, is_hooked, unwrapped
from loco_ext.fx.operations import operation
from loco_ext.fx.trace import trace, tracing_compiled_parts
from loco_ext.nn.locally_connected import LocallyConnected1d, LocallyConnected2d, LocallyConnected3d
from loco_ext.regularizers.affine import AffineCall, Pass
from loco_ext.regularizers.evaluation import measuring

# Layers whose weights paths cross, and layers that paths pass unchanged.
_WEIGHTED = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    LocallyConnected1d,
    LocallyConnected2d,
    LocallyConnected3d,
)
_UNCHANGED = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.ReLU)
_VIEWS = ("flatten", "unflatten", "view", "permute", "transpose", "squeeze", "unsqueeze", "contiguous", "getitem")
_UNCHANGED_BY = (*_VIEWS, "relu", "cat", "size")


@compiler.disable
def path_counts(model: nn.Module, input_size: Sequence[int]) -> Tensor:
    """Return the number of paths from an output to each input, on average over the outputs.

    In a stack of linear layers at initialisation, the expected squared gradient of an output with respect to an input
    is this number times the product of the variances of the layers' weights. It is computed by a backward pass of ones
    through the layers with weights of ones; for convolutions this is a transposed convolution.

    Args:
        model: convolutions, locally connected and linear layers, ReLUs, dropout and flattening, in any order, with sums
            and concatenations of branches. Subclasses of them and layers whose weights are computed are errors.
        input_size: the shape of one input, such as ``(C, H, W)``.

    Returns:
        A tensor of shape ``input_size``, float64.

    Raises:
        TypeError: ``model`` is not a module, or has a layer of another type, another operation or hooks; ``input_size``
            is not a sequence of ints.
        ValueError: torch.fx cannot trace the model; ``input_size`` has an int that is not positive.

    Source:
        "PILCRO: Making Importance Landscapes Flat Again", section 3.1 and Proposition 1.

    Example:
        >>> import torch
        >>> from loco_ext import regularizers
        >>> stack = torch.nn.Sequential(torch.nn.Conv1d(1, 1, 3), torch.nn.Conv1d(1, 1, 3))
        >>> regularizers.path_counts(stack, (1, 5)).tolist()
        [[1.0, 2.0, 3.0, 2.0, 1.0]]
    """
    check_module("model", model)
    sizes = check_ints("input_size", input_size, len(input_size) if isinstance(input_size, Sequence) else 1)
    model = unwrapped(model)
    device = device_of(model)
    with measuring(model, device):
        _check_operations(model)
        # Weights, and so all values, are positive: ReLUs pass them, and biases have to be zero only to keep them small.
        ones = {
            name: torch.full_like(p, 0.0 if name.rpartition(".")[2] == "bias" else 1.0, dtype=torch.float64)
            for name, p in model.named_parameters()
        }
        x = torch.ones(1, *sizes, dtype=torch.float64, device=device, requires_grad=True)
        y = functional_call(model, ones, (x.clone(),))  # the model may write to its input
        if not isinstance(y, Tensor):
            raise TypeError(f"model: expected an output tensor, got {type(y).__name__}")
        (counts,) = torch.autograd.grad(y.sum() / y.numel(), x)
    return counts[0]


def _check_operations(model: nn.Module) -> None:
    """Raise TypeError if the model does anything whose paths would be counted wrongly, ValueError if fx cannot tell."""
    with tracing_compiled_parts():
        graph = trace(model, lambda module: True if type(module) in (*_WEIGHTED, *_UNCHANGED) else None)
    modules = {**dict(graph.named_modules()), "": model}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        call = AffineCall(node, node.args, dict(node.kwargs), (), Pass.VALUE)
        if not _keeps_paths(call):
            got = f"the tensor {node.target} in an operation" if node.op == "get_attr" else call.description
            raise TypeError(f"model: expected linear layers, ReLUs and flattening, got {got}")
    for name, module in modules.items():
        if is_hooked(module):
            raise TypeError(f"model: expected modules without hooks, got some at {name or 'the model itself'}")


def _keeps_paths(call: AffineCall) -> bool:
    """Return whether the paths through an operation have the product of its weights, or 1 where it has none."""
    if call.module is not None:
        return type(call.module) in (*_WEIGHTED, *_UNCHANGED) and "forward" not in vars(call.module)
    name = operation(call.node)
    if name == "add":
        return not call.kwargs and all(isinstance(arg, fx.Node) for arg in call.args)
    return name in _UNCHANGED_BY or call.node.target is getattr
