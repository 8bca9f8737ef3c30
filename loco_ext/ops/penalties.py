"""The penalties that the optimizer step takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loco_ext.ops.device_copies import DeviceCopies

MOST_RINGS = 64  # most rings of a filter that the compiled libraries support


class StepPenalty:
    """A penalty on nested rings, for a step of 1: ``sum_n t_n ||k(G_n)|| + (sum_n q_n ||k(G_n)||)^2`` of each filter.

    If ``joint``, the squared sum runs over all filters.

    Args:
        rings: the ring of every tap, in the order of a contiguous filter, below ``len(thresholds)``.
        thresholds: ``t``, float64 ``(groups,)`` on the CPU, finite, at least 0.
        squared: ``q``, likewise; None for zeros.
        linf: whether groups are measured by their largest weight instead of the Euclidean norm.
        joint: whether the squared sum runs over all filters of the parameter.

    Raises:
        TypeError: thresholds are not float64 on the CPU.
        ValueError: there are more than 64 groups.

    Example:
        >>> import torch
        >>> from loco_ext import ops
        >>> penalty = ops.StepPenalty([0, 1, 0], torch.tensor([0.5, 0.25], dtype=torch.float64))
        >>> w, hyper = torch.ones(1, 1, 3), torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
        >>> ops.optim_step_sgd([w], [torch.zeros_like(w)], [], hyper, penalties=[penalty])
        >>> bool(w[0, 0, 1] > w[0, 0, 0])
        True
    """

    def __init__(
        self,
        rings: Sequence[int],
        thresholds: Tensor,
        squared: Tensor | None = None,
        linf: bool = False,
        joint: bool = False,
    ) -> None:
        for name, values in (("thresholds", thresholds), ("squared", squared)):
            if values is not None and (values.dtype != torch.float64 or not values.is_cpu):
                raise TypeError(f"{name}: expected float64 on the CPU, got {values.dtype} on {values.device}")
        if not 1 <= len(thresholds) <= MOST_RINGS:
            raise ValueError(f"rings: expected 1 to {MOST_RINGS} of them, got {len(thresholds)}")
        self.rings = list(rings)
        self.thresholds = thresholds.contiguous()
        self.squared = None if squared is None else squared.contiguous()
        self.linf = linf
        self.joint = joint and squared is not None
        self._copies = [None if each is None else DeviceCopies(each) for each in (self.thresholds, self.squared)]
        zeros = torch.zeros_like(self.thresholds)
        numbers = torch.tensor([len(self.rings), *self.rings], dtype=torch.float64, device="cpu")
        # The kernels read the penalty from this table: the number of taps, each tap's ring, and each ring's t and q.
        self.table = torch.cat([numbers, self.thresholds, zeros if self.squared is None else self.squared])

    def scaled(self, step: float | Tensor, device: torch.device | None = None) -> tuple[Tensor, Tensor | None]:
        """Return thresholds and squared for a step of this size, as :func:`loco_ext.ops.ring_prox` takes them.

        They are on ``device``. Without one they are on the CPU, and ``step`` has to be a number.
        """
        t, q = (None if copies is None else copies.on(device or torch.device("cpu")) for copies in self._copies)
        assert t is not None
        return step * t, None if q is None else step**0.5 * q


@dataclass(frozen=True)
class LayerPenalty:
    """A penalty that the step's kernels do not support, such as one of a locally connected layer.

    Its prox follows the step of its parameter.

    Args:
        prox: takes the parameter after the step in the compute dtype, the step size, and the metric or None, as
            :meth:`loco_ext.sparsity.RingPenalty.prox`; returns a new tensor.
        prepare: called by the optimizers of :mod:`loco_ext.optim` before a step, before any parameter changes.

    Example:
        >>> import torch
        >>> from loco_ext import ops
        >>> w, hyper = torch.ones(1, 1, 3), torch.tensor([[0.25, 0.0, 0.0, 0.0]], dtype=torch.float64)
        >>> shrinks = ops.LayerPenalty(lambda weight, step, metric: weight - step)
        >>> ops.optim_step_sgd([w], [torch.zeros_like(w)], [], hyper, penalties=[shrinks])
        >>> w
        tensor([[[0.7500, 0.7500, 0.7500]]])
    """

    prox: Callable[[Tensor, float, Tensor | None], Tensor]
    prepare: Callable[[], object] = bool  # does nothing


OfStep = StepPenalty | LayerPenalty
