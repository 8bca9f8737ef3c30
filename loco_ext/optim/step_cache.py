"""The arguments of an optimizer's last step, for a next one that differs in gradients and hyper-parameters alone.

Where parameters are small, collecting them and their states costs more than stepping them. A StepCache refers to
tensors in Python only, as the optimizer itself does, and knows no pointer, size or stride: the operator reads and
checks all of them in each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loco_ext.ops import backends
from loco_ext.ops.optim_step import run_again
from loco_ext.ops.shrink import applied_by_kernels
from loco_ext.ops.step_args import StepArgs
from loco_ext.ops.step_checks import check_step
from loco_ext.optim.options import Group
from loco_ext.optim.plan import Batch, BatchKey, Plan, same_objects

States = Mapping[Tensor, dict[str, Any]]


class StepCache:
    """The arguments of a step that was a single operator call, and all that the next step must find unchanged.

    Args:
        plans: the plans of all groups.
        args: of the step, which has been made; they are changed.
        state: the optimizer's state.
        names: the keys of the lists of states in each entry of ``state``.
    """

    def __init__(self, plans: list[Plan], args: StepArgs, state: States, names: Sequence[str]) -> None:
        self.args, self.device = args, args.params[0].device
        self._plans, self._names, self._forced = plans, names, backends.forced()
        self._hyper = np.zeros(args.hyper.shape)
        args.hyper, args.first = torch.from_numpy(self._hyper), ()
        if any(plan.shapes for plan in plans):
            numbers = [number for shape in [param.shape for param in args.params] for number in (len(shape), *shape)]
            args.shapes = torch.from_numpy(np.array(numbers, dtype=np.float64))
        stepped = set(map(id, args.params))
        self._without_grad = [param for plan in plans for param in plan.params if id(param) not in stepped]
        self._owners = list(state)
        places = dict(zip(map(id, self._owners), range(len(state)), strict=True))
        self._places = [places[which] for which in map(id, args.params) if which in places]  # empty: no states
        self.forget()

    @staticmethod
    def possible(plans: list[Plan], key: BatchKey, batch: Batch) -> bool:
        """Return whether the step that this batch made was nothing but a call of the compiled operator."""
        if key.reference or key.seed is not None or not batch.plain or len(batch.rows) != len(plans):
            return False
        if any(plan.folded or plan.fake_mode is not None for plan in plans):
            return False
        return backends.choose("optim_step", batch.params[0].device) == "native" and _within_kernels(batch)

    def fill(self, plans: list[Plan], groups: list[Group], state: States) -> bool:
        """Give ``args`` their gradients and states; return False if something else has changed."""
        args = self.args
        if plans is not self._plans or len(groups) != len(plans):
            return False
        if args.params[0].device != self.device or backends.forced() != self._forced:
            return False
        if not all(map(Plan.fits_but_for_shapes, plans, groups)):
            return False
        if not same_objects(state, self._owners):
            return False
        grads = [grad for param in args.params if (grad := param.grad) is not None]
        if len(grads) != len(args.params) or any([param.grad is not None for param in self._without_grad]):
            return False
        if args.penalties and not _within_kernels(args):
            return False
        owned = list(state.values())
        states = [owned[place] for place in self._places]
        try:
            args.states = [[tensors[name] for tensors in states] for name in self._names]
            args.steps = [tensors["step"] for tensors in states] if args.rule.counts_steps else ()
        except KeyError:
            return False
        args.grads = grads
        return True

    def step(self, rows: list[list[float]]) -> bool:
        """Make the step with these rows of ``hyper``; return False if the operator refuses it."""
        self._hyper[:] = rows
        try:
            run_again(self.args)
        except Exception:
            if _accepted(self.args):
                raise
            return False
        return True

    def forget(self) -> None:
        """Release the gradients and states, which need not outlive the step."""
        self.args.grads = self.args.states = self.args.steps = ()


def _within_kernels(args: StepArgs | Batch) -> bool:
    return all(map(applied_by_kernels, args.params, args.penalties))


def _accepted(args: StepArgs) -> bool:
    """Return whether the arguments are right; the operator writes nothing where they are not."""
    try:
        check_step(args)
    except (TypeError, ValueError):
        return False
    return True
