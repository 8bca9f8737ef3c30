"""Paths between two models: linear in the weights, along a trained string, or between the outputs."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map, tree_map_only

from loco_ext import compiler
from loco_ext.analysis.curvature import Batches, Loss, batch_loss, check_data
from loco_ext.analysis.masking import layers_of_blocks
from loco_ext.argument_checks import check_choice, check_count, check_module, check_number
from loco_ext.fx.modules import copied, device_of, unwrapped
from loco_ext.regularizers.evaluation import measuring

METHODS = ("linear", "string", "outputs")
STIFFNESS = 0.02


@compiler.disable
@torch.inference_mode(False)  # models and paths can be trained, whatever mode they are made in
def interpolate(
    first: nn.Module,
    second: nn.Module,
    points: int = 11,
    method: str = "linear",
    *,
    loss: Loss | None = None,
    data: Batches | None = None,
    steps: int = 100,
    learning_rate: float = 0.1,
    stiffness: float = STIFFNESS,
) -> Iterator[tuple[float, nn.Module]]:
    """Return the models at equally spaced points of a path between two models, both ends included.

    ``"linear"`` uses the weights ``(1 - alpha) * first + alpha * second``. ``"string"`` starts there; in each step,
    each inner point in turn takes one step of gradient descent, all on the same batch, and is then drawn towards its
    neighbours, ``x += stiffness * (before + after - 2 * x)``. ``"outputs"`` averages the outputs (logits) of the two
    models, ``(1 - alpha) * first(x) + alpha * second(x)``, also in tuples and dicts.

    Args:
        first, second: models whose parameters and buffers have the same names, shapes and dtypes; any two models
            for ``"outputs"``. They are not modified. Wrappers of torch.compile, of data parallelism and of averaged
            weights are ignored.
        points: number of points on the path, at least 2.
        method: ``"linear"``, ``"string"`` or ``"outputs"``.
        loss, data: as for :func:`loco_ext.analysis.gradient_norm`; only used by ``"string"``, which cycles through the
            batches.
        steps, learning_rate: only used by ``"string"``.
        stiffness: only used by ``"string"``, at least 0 and less than 0.5. Drawing a point to its neighbours keeps
            ``1 - 2 * stiffness`` of its gradient step: at 0.5 nothing would be left, and the string would never leave
            the straight line.

    Returns:
        Pairs ``(alpha, model)`` in ascending order of alpha, in evaluation mode. ``"linear"`` and ``"string"`` yield
        the same model each time, with other weights: use each before advancing to the next. Buffers of integers or
        booleans, such as counts of batches, are those of ``first``, and at the other end those of ``second``.

    Raises:
        TypeError: an argument has the wrong type, or ``"string"`` lacks ``loss`` or ``data``.
        ValueError: the method is unknown, a number is out of range, or the models differ in parameters, buffers or
            blocks.

    Source:
        d'Ascoli, Sagun, Bruna, Biroli, "Finding the Needle in the Haystack with Convolutions" (2019), appendix C.

    Example:
        >>> import torch
        >>> from loco_ext import analysis
        >>> first, second = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
        >>> _ = torch.nn.init.zeros_(first.weight), torch.nn.init.ones_(second.weight)
        >>> [(alpha, model.weight.item()) for alpha, model in analysis.interpolate(first, second, points=3)]
        [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0)]
    """
    check_module("first", first)
    check_module("second", second)
    first, second = unwrapped(first), unwrapped(second)
    check_choice("method", method, METHODS)
    check_count("points", points, 2)
    alphas = [place / (points - 1) for place in range(points)]
    if method == "outputs":
        ends = copied(first), copied(second)
        mean = MeanOutputs if _takes_one_input(first) else MeanOutputsOfSeveral
        return ((alpha, mean(*ends, alpha).eval()) for alpha in alphas)
    _check_alike(first, second)
    if method == "linear":
        return _along(first, (_mix(first, second, alpha) for alpha in alphas), alphas)
    if loss is None or data is None:
        raise TypeError(f"{'loss' if loss is None else 'data'}: expected one for the method 'string', got None")
    check_data(data)
    check_count("steps", steps, 0)
    check_number("learning_rate", learning_rate)
    check_number("stiffness", stiffness)
    if stiffness >= 0.5:
        raise ValueError(f"stiffness: expected less than 0.5, got {stiffness}")
    string = [_widened(_mix(first, second, alpha)) for alpha in alphas]
    model = copied(first).eval()
    with measuring(model, device_of(model)):
        for step in range(steps):
            _relax(model, string, loss, data[step % len(data)], learning_rate, stiffness)
    return _along(first, iter(string), alphas)


class MeanOutputs(nn.Module):
    """Module that computes ``(1 - alpha) * first(x) + alpha * second(x)``, tensor by tensor if there are several."""

    def __init__(self, first: nn.Module, second: nn.Module, alpha: float) -> None:
        super().__init__()
        self.first, self.second, self.alpha = first, second, alpha

    def forward(self, x: Tensor) -> Any:
        return self.mean(self.first(x.clone()), self.second(x))  # both may write to their inputs

    def mean(self, first: Any, second: Any) -> Any:
        return tree_map(lambda a, b: None if a is None else (1 - self.alpha) * a + self.alpha * b, first, second)


class MeanOutputsOfSeveral(MeanOutputs):
    """MeanOutputs of any inputs. torch.fx cannot trace it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        copies = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        return self.mean(self.first(*copies[0], **copies[1]), self.second(*args, **kwargs))


def _takes_one_input(model: nn.Module) -> bool:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except ValueError:  # modules of torch.jit.trace do not record it
        return False
    return sum(parameter.default is parameter.empty for parameter in parameters) == 1


State = dict[str, Tensor]


def _tensors(model: nn.Module) -> State:
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _mix(first: nn.Module, second: nn.Module, alpha: float) -> State:
    """Return new, interpolated tensors; integers, such as batch counters, are the first model's except at the end."""
    ends = _tensors(first), _tensors(second)
    return {
        name: _between(a, ends[1][name], alpha) if _is_mixed(a) or alpha == 1 else a.clone()
        for name, a in ends[0].items()
    }


def _widened(state: State) -> State:
    """Return the tensors, those of half precision in float32, in which many small steps add up."""
    return {name: x.to(torch.promote_types(x.dtype, torch.float32)) if _is_mixed(x) else x for name, x in state.items()}


def _is_mixed(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _between(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """Return ``(1 - alpha) * a + alpha * b`` as a new tensor, at an end exactly that one; elements may be infinite."""
    if alpha in (0, 1):
        return (b if alpha else a).clone()
    # lerp subtracts, and the difference of equal infinities is NaN.
    return torch.where(a.isinf() | b.isinf(), a + b, torch.lerp(a, b, alpha))


@torch.inference_mode(False)
def _along(first: nn.Module, states: Iterator[State], alphas: list[float]) -> Iterator[tuple[float, nn.Module]]:
    model = copied(first).eval()
    for alpha, state in zip(alphas, states, strict=True):
        for name, tensor in _tensors(model).items():
            tensor.copy_(state[name])
        yield alpha, model


def _relax(
    model: nn.Module,
    string: Sequence[State],
    loss: Loss,
    batch: tuple[Tensor, Tensor],
    learning_rate: float,
    stiffness: float,
) -> None:
    """Let each inner point of a string take one step down, and draw it to its neighbours, in place."""
    for before, point, after in zip(string, string[1:], string[2:], strict=False):
        _descend(model, point, loss, batch, learning_rate)
        _draw(point, before, after, stiffness)


def _descend(model: nn.Module, point: State, loss: Loss, batch: tuple[Tensor, Tensor], learning_rate: float) -> None:
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    state = {name: point[name].to(tensor.dtype) for name, tensor in _tensors(model).items()}
    leaves = [state[name].detach().requires_grad_() for name in names]
    state |= zip(names, leaves, strict=True)
    value = batch_loss(lambda inputs: functional_call(model, state, (inputs,)), loss, batch)
    gradients = torch.autograd.grad(value, leaves, materialize_grads=True)
    for name, gradient in zip(names, gradients, strict=True):
        point[name].sub_(gradient, alpha=learning_rate)


def _draw(point: State, before: State, after: State, stiffness: float) -> None:
    for name, x in point.items():
        if _is_mixed(x):
            x.copy_(_between(x, _between(before[name], after[name], 0.5), 2 * stiffness))


def _check_alike(first: nn.Module, second: nn.Module) -> None:
    tensors, others = map(_tensors, (first, second))
    for name in tensors | others:
        expected, got = (
            "none" if (t := found.get(name)) is None else f"{t.dtype} of shape {tuple(t.shape)}"
            for found in (tensors, others)
        )
        if got != expected:
            raise ValueError(f"second: expected parameters and buffers as in first, got {got} for {expected} in {name}")
    layers, twins = map(layers_of_blocks, (first, second))
    for (name, layer), twin in zip(layers.items(), twins.values(), strict=True):
        pattern, other = layer.pattern.to("cpu"), twin.pattern.to("cpu")
        if not (
            torch.equal(pattern.crow_indices, other.crow_indices)
            and torch.equal(pattern.col_indices, other.col_indices)
        ):
            raise ValueError(f"second: expected the blocks of first, got others in {name or 'the model'}")
