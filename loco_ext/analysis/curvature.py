"""The training loss around a model's weights: its gradient norm and its largest curvature."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loco_ext import compiler
from loco_ext.argument_checks import check_count, check_number, check_seed
from loco_ext.fx.modules import unwrapped
from loco_ext.optim.backward import ordinary_gradients
from loco_ext.regularizers.evaluation import measuring, trained_parameters

Loss = Callable[[Tensor, Tensor], Tensor]
Batches = Sequence[tuple[Tensor, Tensor]]
Vector = list[Tensor]  # one tensor for each parameter


class TopEigenvalue(NamedTuple):
    """Result of the power iteration.

    Attributes:
        value: the eigenvalue, as the Rayleigh quotient of the last vector.
        residual: ``||H v - value * v||`` over ``|value|``: the Hessian has an eigenvalue within this relative distance
            of ``value``, and usually a much closer one.
        iterations: number of Hessian-vector products.

    Example:
        >>> from loco_ext import analysis
        >>> analysis.TopEigenvalue(value=2.0, residual=1e-3, iterations=12).value
        2.0
    """

    value: float
    residual: float
    iterations: int


@compiler.disable
def gradient_norm(model: nn.Module, loss: Loss, data: Batches) -> float:
    """Return the norm of the loss gradient for all parameters that require one, over all of ``data`` at once.

    Args:
        model: evaluated in evaluation mode without autocast; its flags, the ``grad`` of its parameters and the RNG are
            left as they were.
        loss: function of outputs and targets that returns the mean over samples.
        data: batches ``(inputs, targets)`` of any sizes.

    Raises:
        TypeError: ``model`` is not a module or has sharded parameters, or ``data`` is not a sequence of pairs.
        ValueError: there are no batches, or no parameter requires a gradient.

    Source:
        d'Ascoli, Sagun, Bruna, Biroli, "Finding the Needle in the Haystack with Convolutions" (2019), section 4.2.

    Example:
        >>> import torch
        >>> from loco_ext import analysis
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> batch = torch.eye(2), torch.zeros(2, 1)
        >>> norm = analysis.gradient_norm(model, torch.nn.functional.mse_loss, [batch])
        >>> torch.isclose(torch.tensor(norm), model.weight.norm().detach())
        tensor(True)
    """
    check_data(data)
    parameters, model = trained_parameters(model), unwrapped(model)
    with measuring(model, parameters[0].device), ordinary_gradients(model):
        total = _zeros(parameters)
        for value, share in _losses(model, loss, data):
            _add(total, torch.autograd.grad(value, parameters, materialize_grads=True), share)
    return _norm(total)


@compiler.disable
def top_hessian_eigenvalue(
    model: nn.Module, loss: Loss, data: Batches, *, iterations: int = 100, tolerance: float = 1e-3, seed: int = 0
) -> TopEigenvalue:
    """Return the largest eigenvalue of the loss Hessian for all parameters that require a gradient, by power iteration.

    Hessian-vector products are exact: gradients of gradients, summed over the batches. If the eigenvalue of largest
    magnitude is negative, a second iteration finds the largest eigenvalue after deflating the first.

    Args:
        model, loss, data: as for :func:`gradient_norm`; the loss has to be differentiable twice.
        iterations: maximum number of Hessian-vector products; a second iteration has the same maximum.
        tolerance: residual at which to stop; see :class:`TopEigenvalue`.
        seed: seed of the start vector, which is drawn on the CPU.

    Raises:
        TypeError, ValueError: as :func:`gradient_norm`; ``iterations`` is below 1 or ``tolerance`` is negative.

    Source:
        d'Ascoli, Sagun, Bruna, Biroli, "Finding the Needle in the Haystack with Convolutions" (2019), section 4.2.

    Example:
        >>> import torch
        >>> from loco_ext import analysis
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> batch = torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.zeros(2, 1)
        >>> round(analysis.top_hessian_eigenvalue(model, torch.nn.functional.mse_loss, [batch]).value, 3)
        9.0
    """
    check_data(data)
    parameters, model = trained_parameters(model), unwrapped(model)
    check_number("tolerance", tolerance)
    check_count("iterations", iterations, smallest=1)
    check_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    with measuring(model, parameters[0].device), ordinary_gradients(model):
        normal = (torch.randn(p.shape, generator=generator, dtype=p.dtype, device="cpu") for p in parameters)
        start = [part.to(p.device) for part, p in zip(normal, parameters, strict=True)]
        product = partial(_hessian_product, model, loss, data, parameters)
        found = _power_iteration(product, start, iterations, tolerance)
        if not found.value < 0:
            return found
        lowest = found.value

        def shifted(vector: Vector) -> Vector:
            return [p.sub_(lowest * v) for p, v in zip(product(vector), vector, strict=True)]

        above = _power_iteration(shifted, start, iterations, tolerance)
    value = lowest + above.value
    residual = above.residual * above.value / abs(value) if value else math.inf
    return TopEigenvalue(value, residual, found.iterations + above.iterations)


def check_data(data: Batches) -> None:
    """Raise TypeError or ValueError unless ``data`` is a non-empty sequence of batches."""
    if not isinstance(data, Sequence) or not all(isinstance(batch, tuple | list) and len(batch) == 2 for batch in data):
        raise TypeError(f"data: expected a sequence of pairs (inputs, targets), got {type(data).__name__}")
    if not sum(len(targets) for _, targets in data):
        raise ValueError("data: expected at least one sample, got none")


def _losses(model: nn.Module, loss: Loss, data: Batches) -> Iterator[tuple[Tensor, float]]:
    """Yield the loss of each batch and its share in the mean loss over all samples."""
    count = sum(len(targets) for _, targets in data)
    for batch in data:
        yield batch_loss(model, loss, batch), len(batch[1]) / count


def batch_loss(model: Callable[[Tensor], Tensor], loss: Loss, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a batch, of which the model gets a copy: it may write to its input."""
    inputs, targets = (part.clone() if isinstance(part, Tensor) else part for part in batch)
    return loss(model(inputs), targets)


def _hessian_product(
    model: nn.Module, loss: Loss, data: Batches, parameters: list[nn.Parameter], vector: Vector
) -> Vector:
    total = _zeros(parameters)
    with _WeightNormsInParts():
        for value, share in _losses(model, loss, data):
            gradients = torch.autograd.grad(value, parameters, create_graph=True, materialize_grads=True)
            curved = [(g, v.to(g.dtype)) for g, v in zip(gradients, vector, strict=True) if g.requires_grad]
            if curved:  # a loss that is linear in all parameters has no second derivative
                outputs, directions = zip(*curved, strict=True)
                _add(total, torch.autograd.grad(outputs, parameters, directions, materialize_grads=True), share)
    return total


class _WeightNormsInParts(TorchFunctionMode):
    """Compute weight norms by several operations: second derivatives of torch's fused one take norms for constants."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return (_weight_norm if func is torch._weight_norm else func)(*args, **kwargs or {})


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _power_iteration(
    product: Callable[[Vector], Vector], start: Vector, iterations: int, tolerance: float
) -> TopEigenvalue:
    """Return the eigenvalue of largest magnitude."""
    norm = _norm(start)
    vector = [part / norm for part in start]
    value = residual = 0.0
    for iteration in range(1, iterations + 1):
        image = product(vector)
        value = math.fsum(
            (_real(v) * _real(i)).sum(dtype=torch.float64).item() for v, i in zip(vector, image, strict=True)
        )
        norm = _norm(image)
        distance = _norm([i - value * v for i, v in zip(image, vector, strict=True)])
        residual = distance / abs(value) if value else (math.inf if norm else 0.0)
        if not (residual > tolerance and math.isfinite(norm)):
            return TopEigenvalue(value, residual, iteration)
        vector = [part.div_(norm) for part in image]
    return TopEigenvalue(value, residual, iterations)


def _zeros(parameters: Sequence[Tensor]) -> Vector:
    """Return zeros to which many batches can be added: in float32 for parameters of half precision."""
    return [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]


@torch.no_grad()
def _add(total: Vector, parts: Sequence[Tensor], share: float) -> None:
    for sum_, part in zip(total, parts, strict=True):
        sum_.add_(part, alpha=share)


def _norm(vector: Sequence[Tensor]) -> float:
    return math.hypot(*(torch.linalg.vector_norm(_real(part.detach()), dtype=torch.float64).item() for part in vector))


def _real(part: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, any other as it is."""
    return torch.view_as_real(part) if part.is_complex() else part
