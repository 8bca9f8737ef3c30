"""Penalties as the optimizer step takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from loco_ext.ops import backends

Prepare = Callable[[], object]


class StepPenalty:
    """A penalty on nested rings, for a step of 1: ``sum_n t_n ||k(G_n)|| + (sum_n q_n ||k(G_n)||)^2`` of each kernel,
    or with the square of the sum over all kernels.

    Args:
        rings: of every tap, in the order of a contiguous kernel, below ``len(thresholds)``.
        thresholds: ``t``, float64 ``(groups,)`` on the CPU, finite, at least 0.
        squared: ``q``, likewise; None: zeros.
        linf: groups are measured by their largest weight, not by the Euclidean norm.
        factors: of each kernel's thresholds and squared, float64 ``(C_out,)``, contiguous, on the parameter's device,
            finite, at least 0; every step reads them anew. None: ones.
        prepare: as for :class:`LayerPenalty`.
        coupled: what is squared is the sum over all kernels of the parameter.

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
        factors: Tensor | None = None,
        prepare: Prepare = bool,
        coupled: bool = False,
    ) -> None:
        self.rings = list(rings)
        self.thresholds = thresholds.contiguous()
        self.squared = None if squared is None else squared.contiguous()
        self.linf = linf
        self.coupled = coupled and squared is not None
        self.factors = factors
        self.prepare = prepare
        self._numbers: dict[ModuleType | None, int] = {}

    def number_for(self, param: Tensor) -> int:
        """What stands for it in steps of such parameters by the compiled library for their device, which keeps it until
        this object is gone."""
        library = backends.cuda_library if param.is_cuda else backends.library
        if library not in self._numbers:
            hold = backends.operators().ring_penalty_hold
            mode = (self.linf, self.coupled, self.factors)
            self._numbers[library] = hold(param, self.rings, self.thresholds, self.squared, *mode)
        return self._numbers[library]

    @property
    def of_layer(self) -> bool:
        """Whether it is for all kernels of a layer together, or may change from step to step."""
        return self.coupled or self.factors is not None

    def scaled(self, step: float) -> tuple[Tensor, Tensor | None]:
        """Thresholds and squared for a step of this size, as :func:`loco_ext.ops.ring_prox` takes them."""
        factors = 1.0 if self.factors is None else self.factors.cpu()[:, None]
        squared = None if self.squared is None else factors * (step**0.5 * self.squared)
        return factors * (step * self.thresholds), squared

    def __del__(self) -> None:
        for library, number in getattr(self, "_numbers", {}).items():
            if library:
                library.release(number)


@dataclass(frozen=True)
class LayerPenalty:
    """A penalty that the step's kernels do not know, such as one of a locally connected layer: its prox follows the
    step of its parameter.

    Args:
        prox: given what the step has left, in the type that arithmetic is done in, the step size and the metric or
            None, as :meth:`loco_ext.sparsity.RingPenalty.prox`; returns a new tensor.
        prepare: what the optimizers of :mod:`loco_ext.optim` call ahead of a step, before any parameter changes.

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
    prepare: Prepare = bool  # does nothing

    @property
    def of_layer(self) -> bool:
        """As that of :class:`StepPenalty`."""
        return True


OfStep = StepPenalty | LayerPenalty
