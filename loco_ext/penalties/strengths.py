"""The least strengths at which penalties leave nothing of a model."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from loco_ext.fx.modules import copied
from loco_ext.nn.computed import check_plain, is_convolution, weight_of
from loco_ext.penalties.group import GroupPenalty
from loco_ext.penalties.penalty_checks import check_convolution
from loco_ext.reference.ring_prox import power_of_two

_PRECISION = 1e-12  # relative precision of the bisection


def convolutions(model: nn.Module) -> dict[str, _ConvNd]:
    """Return the modules whose weights are penalised, by name: convolutions of 1 to 3 axes, not transposed."""
    return {name: module for name, module in model.named_modules() if is_convolution(module)}


def is_empty(model: nn.Module) -> bool:
    """Return whether all weights of all convolutions are zero."""
    return not any(bool(weight_of(module).any()) for module in convolutions(model).values())


def dual_norm(penalty: GroupPenalty, gradient: Tensor) -> float:
    """Return the dual norm of the penalty with strength 1: the least strength that keeps a zero weight at zero.

    A weight of zero is optimal, with all other weights fixed, if ``-gradient`` is a subgradient of the penalty there,
    that is, if the prox of ``gradient`` is zero.

    Args:
        penalty: its strength is ignored; ``power=1``.
        gradient: gradient of the loss with respect to a convolution's weight, at zero.

    Raises:
        TypeError, ValueError: as for ``penalty.prox``; the gradient is not finite; ``power=2``, which never sets
            everything to zero.

    Example:
        >>> import torch
        >>> from loco_ext import sparsity
        >>> gradient = torch.tensor([3.0, 4.0]).view(1, 2, 1, 1)
        >>> round(sparsity.dual_norm(sparsity.KernelPenalty(1.0), gradient), 6)
        5.0
    """
    _check_power(penalty)
    check_convolution("gradient", gradient)
    if not bool(gradient.isfinite().all()):
        raise ValueError("gradient: expected finite numbers")
    unit, gradient = replace(penalty, strength=1.0), gradient.detach().double()
    scale = power_of_two(gradient.abs().amax()).item() if gradient.numel() else 1.0
    gradient = gradient * scale
    # The last group's threshold alone zeroes a filter at its norm (l2) or sum of sizes (linf) over the weight.
    sizes = torch.linalg.vector_norm(gradient.flatten(1), ord=2 if penalty.norm == "l2" else 1, dim=1)
    largest = sizes.max().item() if sizes.numel() else 0.0
    lower, upper = 0.0, largest / unit.group_weights(gradient)[-1].item() * (1 + _PRECISION)
    while upper - lower > _PRECISION * upper:
        middle = (lower + upper) / 2
        lower, upper = (middle, upper) if bool(unit.prox(gradient, middle).any()) else (lower, middle)
    return upper / scale


def _check_power(penalty: GroupPenalty) -> None:
    if not isinstance(penalty, GroupPenalty):
        raise TypeError(f"penalty: expected a RingPenalty or a KernelPenalty, got {penalty!r}")
    if penalty.power != 1:
        raise ValueError(f"penalty: expected power=1, which can leave nothing, got power={penalty.power}")


@torch.inference_mode(False)
@torch.enable_grad()
def max_strength(model: nn.Module, loss: Callable[[nn.Module], Tensor], penalty: GroupPenalty) -> dict[str, float]:
    """Return, for each convolution, the least strength at which it stays zero once it is zero, all others being fixed.

    This is the dual norm of the loss's gradient with the layer's weight set to zero. If batch normalisation follows a
    convolution, the gradient at zero is larger than elsewhere, because normalisation removes any scale. The factor is
    the norm of the convolution's output over the square root of the normalisation's eps.

    Args:
        model: it is not changed, and is run in its current mode.
        loss: returns the loss of a model as a scalar, without the penalty, on representative samples.
        penalty: its strength is ignored; ``power=1``.

    Returns:
        Strengths by module name, 0 for a convolution that the loss does not depend on;
        :func:`loco_ext.sparsity.frontier` starts from the largest.

    Raises:
        TypeError, ValueError: as for :func:`dual_norm`; the model has no convolutions, or one whose weight a
            parametrization or a hook computes.

    Example:
        >>> import torch
        >>> from loco_ext import sparsity
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(2, 2))
        >>> x = torch.randn(8, 1, 3, 3)
        >>> list(sparsity.max_strength(model, lambda model: model(x).square().sum(), sparsity.RingPenalty(1.0)))
        ['0']
    """
    check_plain(model)
    _check_power(penalty)
    model = copied(model)
    layers = convolutions(model)
    if not layers:
        raise ValueError("model: expected at least one convolution, found none")
    strengths = {}
    for module in layers.values():
        module.weight.requires_grad_()
    for name, module in layers.items():
        weight = module.weight
        value = weight.detach().clone()
        with torch.no_grad():
            weight.zero_()
        (gradient,) = torch.autograd.grad(loss(model), weight, materialize_grads=True)
        with torch.no_grad():
            weight.copy_(value)
        strengths[name] = dual_norm(penalty, gradient)
    return strengths
