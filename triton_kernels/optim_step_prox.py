"""The prox that ends the step of parameters with a penalty.

Each prox is a launch of its own after those of the step, and reads and writes the weight once more. Thresholds and
metrics are computed from tensors on the device (learning rates, step counts, second moments), so that the host never
waits and a CUDA graph can capture the step. If a penalty couples filters, their common factor follows directly from
Euclidean norms without a metric; in all other cases finding it takes 80 times the launches of a prox and of norms, with
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
    """The proxes of one step.

    Args:
        penalties: a :class:`loco_ext.ops.StepPenalty` or None for each parameter; may be empty.
        params: the parameters that are stepped.
        seed: the seed of stochastic rounding, or None.

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
        """Return the tensors, with those of penalised parameters in the compute dtype.

        If that differs from their dtype, they are copies: whatever the prox reads is rounded once, afterwards.
        """
        wide = list(tensors)
        for i in self.chosen:
            wide[i] = wide[i].to(torch.promote_types(self.params[i].dtype, torch.float32))
        return wide

    def narrow(self, wide: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Round the copies that :meth:`widened` made, after the step, to the original tensors."""
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
        """Write the prox of ``w``, the parameter after its step, to the parameter, unless ``found_inf`` is set."""
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
    """Return a group's learning rate, in float64 on the device if it is a tensor there."""
    which = lr_index[group] if lr_index else -1
    return float(hyper[group, 0]) if which < 0 else lrs[which].double().reshape(())


def adam_metric(second: Tensor, beta2: float, eps: float, step: Tensor) -> Tensor:
    """Return the divisor of Adam's update, ``sqrt(v / (1 - beta2^t)) + eps``."""
    correction = (1 - beta2 ** step.double()).sqrt().to(second.dtype)
    return second.double().sqrt().to(second.dtype) / correction + eps
