"""Checks of the arguments of penalties and proxes; their errors name the argument, the expectation and the value."""

from collections.abc import Sequence

import torch
from torch import Tensor

from loco_ext.argument_checks import check_memory, check_tensor
from loco_ext.geometry.attached_pattern import pattern_of
from loco_ext.ops.ring_prox import check_metric as check_like

NORMS = ("l2", "linf")


def check_convolution(name: str, weight: Tensor) -> None:
    """Raise TypeError or ValueError unless ``weight`` can be a convolution's, with at least one weight per filter."""
    check_tensor(name, weight)
    check_memory(name, weight)
    if pattern_of(weight) is not None:
        raise TypeError(f"{name}: expected a convolution's weight, got the blocks of a locally connected layer")
    if not 3 <= weight.dim() <= 5:
        raise ValueError(
            f"{name}: expected a convolution's weight of 3 to 5 dimensions, (C_out, C_in/groups, *kernel_size), "
            f"got shape {tuple(weight.shape)}"
        )
    if weight.shape[1:].numel() == 0:
        raise ValueError(f"{name}: expected at least one weight a filter, got shape {tuple(weight.shape)}")


def check_metric(metric: Tensor | None, weight: Tensor) -> None:
    """Raise TypeError or ValueError unless a metric is like ``weight`` and, where it can be read, positive."""
    if metric is None:
        return
    if not isinstance(metric, Tensor):
        raise TypeError(f"metric: expected a tensor or None, got {type(metric).__name__}")
    check_like(metric, weight)
    if not torch.compiler.is_compiling() and not metric.is_meta and (metric <= 0).any():
        raise ValueError(f"metric: expected positive numbers, got {metric.min().item()}")


def thresholds_of(name: str, values: Sequence[float] | Tensor, count: int, filters: int) -> Tensor:
    """Return float64 on the CPU, ``(count,)`` or ``(filters, count)``; raise TypeError or ValueError otherwise."""
    try:
        t = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a tensor or a sequence of numbers, got {values!r}") from error
    if t.shape not in ((count,), (filters, count)):
        raise ValueError(
            f"{name}: expected {count} numbers, one for each group, or a row of them for each of {filters} filters, "
            f"got shape {tuple(t.shape)}"
        )
    return t
