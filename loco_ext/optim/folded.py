"""FoldedPenalty in the optimizers: what they add to a step of a convolution's weight and of its norm's weight.

:class:`loco_ext.sparsity.FoldedPenalty` states what is minimised. Its pulls on the norm's weight and on the direction
of the filters are proxes after the step, each with the step size or metric of its parameter. The second pull keeps the
filters' norms by scaling them back. In Adam's metric that alone would lead to another minimum. There the part of the
pull that points outwards along the filter, which is smooth, joins the gradient instead, so that nothing is left to
scale back at the minimum.

Where compiled kernels on the CPU make the step of a penalty on Euclidean norms, they do this to a filter while it is in
the caches, and return the penalty of each filter, by which the norm's weight is then shrunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from loco_ext.ops import backends
from loco_ext.ops.penalties import StepPenalty
from loco_ext.ops.shrink import applied_by_kernels
from loco_ext.optim.options import Group, uses_torch
from loco_ext.optim.plan import StepPlan
from loco_ext.penalties.folded import FoldedFactors, column_of, lengths_of
from loco_ext.reference.dtypes import compute_dtype


class _Optimizer(Protocol):
    param_groups: list[Group]
    state: Any

    def _prox_size(self, group: Group, param: Tensor) -> tuple[Any, Tensor | None]: ...


@contextmanager
def folded_steps(optimizer: _Optimizer, plans: list[StepPlan]) -> Iterator[list[StepPlan]]:
    """Return a context in which the optimizer steps by the plans that it yields; the rest follows at its end.

    Raises:
        ValueError: a norm's weight is not stepped by this optimizer. Nothing has changed then.
        NotImplementedError: parameters are sharded, or rounding is stochastic.
    """
    group_of = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    steps = [_FoldedStep(optimizer, group_of, *entry) for plan in plans for entry in plan.folded]
    gradients = [(step.weight, step.weight.grad) for step in steps]
    found_inf, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
    try:
        for step in steps:
            step.begin(scale)
        yield _with_penalties(plans, {id(step.weight): step.in_kernels for step in steps})
    finally:
        for weight, grad in gradients:
            if grad is not weight.grad and grad is not None:
                weight.grad = grad
                if scale is not None:  # the fused step divides gradients by their scale, in memory too
                    grad.copy_(_unless(found_inf, grad / scale.to(grad), grad))
    for step in steps:
        step.end(found_inf)


def _with_penalties(plans: list[StepPlan], added: dict[int, StepPenalty | None]) -> list[StepPlan]:
    """Return the plans with ``added`` penalties, by the ids of parameters, for those that have none."""
    result = []
    for plan in plans:
        own = plan.penalties or [None] * len(plan.params)
        penalties = [penalty or added.get(id(param)) for param, penalty in zip(plan.params, own, strict=True)]
        result.append(replace(plan, penalties=penalties if any(penalties) else []))
    return result


class _FoldedStep:
    """One step of a convolution's weight and of its norm's weight."""

    def __init__(
        self,
        optimizer: _Optimizer,
        group_of: dict[int, Group],
        weight: Tensor,
        factors: FoldedFactors,
    ) -> None:
        self.optimizer, self.weight, self.factors = optimizer, weight, factors
        self.gamma: Tensor = factors.batch_norm.weight
        self.group = group_of[id(weight)]
        if id(self.gamma) not in group_of:
            raise ValueError(
                "penalty: expected the weight of the batch norm of a FoldedPenalty among the parameters of the same "
                f"optimizer, as it shrinks with the filters, got none of the {len(group_of)}; without it use "
                f"{type(factors.inner).__name__} alone"
            )
        self.gamma_group = group_of[id(self.gamma)]
        if weight.grad is not None and not self.gamma.requires_grad:
            raise ValueError(
                "penalty: expected a batch norm whose weight requires a gradient, as it shrinks with the filters of a "
                f"FoldedPenalty, got a frozen one; without it use {type(factors.inner).__name__} alone"
            )
        for param, group in ((weight, self.group), (self.gamma, self.gamma_group)):
            if type(param) not in (Tensor, Parameter):
                raise NotImplementedError(
                    "penalty: expected no sharding, ordinary parameters, for a FoldedPenalty and its batch norm, got "
                    f"{type(param).__name__}"
                )
            if group["stochastic_rounding"] is not None and param.dtype == torch.bfloat16:
                raise NotImplementedError(
                    "stochastic_rounding: expected None for bfloat16 parameters with a FoldedPenalty, of which a part "
                    "follows the step's kernels"
                )
        self.in_kernels = self._for_kernels()
        self.turns = weight.grad is not None and factors.depend_on_direction and self.in_kernels is None

    def _for_kernels(self) -> StepPenalty | None:
        """Return the penalty that kernels apply in the step of the weight; None if they do not make it."""
        weight, group = self.weight, self.group
        stepped = weight.grad is not None and not uses_torch(group) and group["fused"] is not False
        if not (stepped and weight.is_cpu and backends.choose("optim_step", weight.device) == "native"):
            return None
        penalty = self.factors.for_kernels()
        return penalty if penalty is not None and applied_by_kernels(weight, penalty) else None

    def begin(self, scale: Tensor | None) -> None:
        """Read what the penalty depends on before the step. ``scale``: the factor that gradients carry, or None."""
        if not self.turns:
            return
        weight = self.weight.detach()
        self.scales = self.factors.scales()
        self.lengths = lengths_of(weight)
        if "betas" not in self.group:
            return
        pull = self.factors.pull_along(weight, self.scales)
        pull = -pull if self.group["maximize"] else pull
        pull = pull if scale is None else pull * scale.to(pull)
        column = column_of(pull.to(compute_dtype(weight.dtype)), weight)
        grad = self.weight.grad
        assert grad is not None
        self.weight.grad = grad + (column * weight).to(grad.dtype)

    def end(self, found_inf: Tensor | None) -> None:
        """Shrink both factors by the step sizes or metrics that the step has used."""
        if found_inf is not None and not self._has_states():
            return  # the step was skipped: not even states were created
        weight, gamma = self.weight.detach(), self.gamma.detach()
        wide = weight.to(compute_dtype(weight.dtype))
        if self.turns:
            size, metric = self.optimizer._prox_size(self.group, self.weight)
            lengths = lengths_of(wide) if metric is None else self.lengths
            wide = self.factors.rotate(wide, self.scales, size, lengths, metric)
            weight.copy_(_unless(found_inf, wide, weight))
        if self.gamma.grad is not None:
            size, metric = self.optimizer._prox_size(self.gamma_group, self.gamma)
            size = size if metric is None else size / metric.double()
            scales = None if self.in_kernels is None else self.in_kernels.scales
            values = self.factors.values(wide) if scales is None else scales[1]
            shortened = self.factors.shorten(gamma, values, size)
            gamma.copy_(_unless(found_inf, shortened, gamma))

    def _has_states(self) -> bool:
        stepped = [(self.group, self.weight), (self.gamma_group, self.gamma)]
        state = self.optimizer.state
        return all("betas" not in group or p.grad is None or state.get(p) for group, p in stepped)


def _unless(found_inf: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """Return ``new``, or ``old`` in its dtype if GradScaler has found infinite gradients."""
    return new if found_inf is None else torch.where(found_inf.to(new.device) == 0, new, old.to(new.dtype))
