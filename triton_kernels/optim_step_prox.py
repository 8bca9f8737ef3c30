"""The prox that ends the step of parameters with a penalty.

Each is a launch of its own behind those of the step, in which a weight passes through memory once more. Thresholds and
metrics are made of tensors of the device (learning rates, step counts, second moments), so that nothing waits for it
and a CUDA graph can record the step. Where kernels are shrunk together, and their norms do not tell the factor that
they share at once as Euclidean ones without a metric do, it takes 80 times the launches of a prox and of norms, with
torch's between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from loco_ext.triton_kernels.ring_prox import ring_norms, ring_prox_by, thresholds_on
from torch import Tensor

from loco_ext.ops.coupled import group_norms_by, shared_factor


class Proxes:
    """The proxes of a step.

    Args:
        penalties: a :class:`loco_ext.ops.StepPenalty` or None for each parameter; may be empty.
        params: what is stepped.
        seed: of stochastic rounding.

    Raises:
        NotImplementedError: parameters would be rounded stochastically before the prox.
    """

    def __init__(self, penalties: Sequence[Any], params: Sequence[Tensor], seed: int | None) -> None:
        self.penalties, self.params = penalties, params
        self.chosen = [i for i, penalty in enumerate(penalties) if penalty is not None and params[i].numel() > 0]
        if seed is not None and any(params[i].dtype == torch.bfloat16 for i in self.chosen):
            raise NotImplementedError(
                "stochastic_rounding: expected None for bfloat16 parameters with a penalty where Triton makes the step"
            )

    def widened(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of the parameters that a prox follows in the type that arithmetic is done in, in memory of their own if
        that is another: what the prox reads is rounded once, afterwards."""
        wide = list(tensors)
        for i in self.chosen:
            wide[i] = wide[i].to(torch.promote_types(self.params[i].dtype, torch.float32))
        return wide

    def narrow(self, wide: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Rounds what :meth:`widened` has made, and the step has changed, to where it belongs."""
        for i in self.chosen:
            if wide[i] is not tensors[i]:
                tensors[i].copy_(wide[i])

    def end(
        self,
        index: int,
        w: Tensor,
        size: Tensor | float,
        metric: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Writes the prox of ``w``, what the step has made of a parameter, to the parameter; nothing changes where
        ``found_inf`` says so."""
        penalty, param = self.penalties[index], self.params[index]
        t, q = thresholds_on(param.device, penalty.thresholds, penalty.squared)
        t, q = t * size, None if q is None else q * size**0.5
        if q is not None and penalty.coupled:
            shrunk = self._shrunk_together(w, penalty, t, q, metric)
        else:
            shrunk = ring_prox_by(w, penalty.rings, t, q, metric, penalty.linf)
        param.copy_(shrunk if found_inf is None else torch.where(found_inf == 0, shrunk, param.to(shrunk.dtype)))

    @staticmethod
    def _shrunk_together(w: Tensor, penalty: Any, t: Tensor, q: Tensor, metric: Tensor | None) -> Tensor:
        def prox(factor: Tensor) -> Tensor:
            return ring_prox_by(w, penalty.rings, t + factor * q, None, metric, penalty.linf)

        plain = metric is None and not penalty.linf and not penalty.thresholds.any()
        norms_of = partial(group_norms_by, ring_norms, rings=penalty.rings, count=q.shape[-1], linf=penalty.linf)
        return prox(shared_factor(prox, norms_of, w, q.expand(len(w), -1), plain, waits=False))


def learning_rate(hyper: Tensor, lrs: Sequence[Tensor], lr_index: Sequence[int], group: int) -> Tensor | float:
    """A group's, on the device if it has it, in float64."""
    which = lr_index[group] if lr_index else -1
    return float(hyper[group, 0]) if which < 0 else lrs[which].double().reshape(())


def adam_metric(second: Tensor, beta2: float, eps: float, step: Tensor) -> Tensor:
    """What Adam's update divides by."""
    correction = (1 - beta2 ** step.double()).sqrt().to(second.dtype)
    return second.double().sqrt().to(second.dtype) / correction + eps
