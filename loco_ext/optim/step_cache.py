"""The calls of an optimizer's last step, for a next one with other gradients and hyper-parameters.

Where parameters are small, collecting, checking and describing them and their states costs more than stepping them. A
StepCache refers to parameters in Python only, as the optimizer itself does, and to no state. The compiled library keeps
what it has found out about a step's tensors (``csrc/optim_step/cached_step.h``). That is right while all parameters and
states lie in the same memory with the same sizes, strides and dtypes; SameTensors compares these in each step, and the
library reads and checks every gradient.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loco_ext.ops import backends
from loco_ext.ops.optim_step import run_again, run_and_cache, run_step
from loco_ext.ops.prox_after_step import applied_by_kernels
from loco_ext.ops.step_args import StepArgs
from loco_ext.ops.step_checks import check_scalars, check_step
from loco_ext.optim.options import Group
from loco_ext.optim.plan import Batch, StepPlan, same_objects

# The library for CPU tensors has it, and reads tensors on other devices as well. Without a library there is no cache.
_SameTensors: Any = getattr(backends.library, "SameTensors", None)

States = Mapping[Tensor, dict[str, Any]]


class CachedBatch:
    """The arguments of one operator call of a step, and how the library keeps them.

    Args:
        args: of the call, which has been made; they are changed.
        state: the optimizer's state.
    """

    def __init__(self, args: Batch, state: States) -> None:
        self.args, self.device = args, args.params[0].device
        self._chosen = backends.choose("optim_step", self.device)
        self._names = tuple(args.states_by_name())
        self.hyper = np.zeros(args.hyper.shape)  # to be filled for each step
        args.hyper, args.first = torch.from_numpy(self.hyper), []
        self._owners = list(state)
        places = dict(zip(map(id, state), range(len(state)), strict=True))
        self._places = [places[which] for which in map(id, args.params) if which in places]  # empty: no states
        self._cached: tuple[Any, Any] | None = None  # the addresses of a cached step's tensors, and the step
        self._state: States = {}
        self._lies_as_before = False  # whether all parameters and states lie as in the cached step

    def expect_shapes(self) -> None:
        """Let the operator refuse parameters of other shapes than now, on which maps and penalties depend."""
        numbers = [number for param in self.args.params for number in (param.dim(), *param.shape)]
        self.args.shapes = torch.from_numpy(np.array(numbers, dtype=np.float64))

    def fill(self, state: States) -> bool:
        """Give ``args`` their gradients and states; return False if something is missing."""
        args = self.args
        if args.params[0].device != self.device or (args.penalties and not _within_kernels(args)):
            return False
        self._state = state
        grads = None
        if self._cached is not None:
            grads = self._cached[0].gradients(args.params, state, self._owners, self._names)
        self._lies_as_before = grads is not None
        args.grads = grads or [grad for param in args.params if (grad := param.grad) is not None]
        return self._lies_as_before or (len(args.grads) == len(args.params) and self._collect_states())

    def _collect_states(self) -> bool:
        """Give ``args`` their states; return False if one is missing."""
        if not same_objects(self._state, self._owners):
            return False
        owned = list(self._state.values())
        states = [owned[place] for place in self._places]
        try:
            lists = [[tensors[name] for tensors in states] for name in self._names]
        except KeyError:
            return False
        self.args.steps = lists.pop() if self.args.rule.counts_steps else []
        self.args.states = lists
        return True

    def step(self, check: bool = False) -> bool:
        """Make the step with the filled arguments; return False if the operator refuses it.

        With ``check``, return whether the operator accepts it, and write nothing.
        """
        try:
            if self._cached is not None and self._lies_as_before:
                if run_again(self._chosen, self._cached[1], self.args, check):
                    if check:
                        check_scalars(self.args, self.device)  # the library reads them only in a step
                    return True
                self._collect_states()
            self._cached, self._lies_as_before = None, False
            if check:
                run_step(replace(self.args, found_inf=torch.ones((), device=self.device)))
            else:
                cached = run_and_cache(self._chosen, self.args)
                addresses = _SameTensors(self.args.params, self._state, self._owners, self._places, self._names)
                self._cached = addresses, cached
        except Exception:
            self._collect_states()
            if _accepted(self.args):
                raise
            return False
        return True

    def forget(self) -> None:
        """Release the gradients and states, which need not outlive the step."""
        self.args.grads, self.args.states, self.args.steps = [], [], []
        self._state, self._lies_as_before = {}, False


class StepCache:
    """The operator calls of a step, and all that the next step must find unchanged.

    Args:
        plans: the plans of all groups.
        batches: the calls.
    """

    def __init__(self, plans: list[StepPlan], batches: list[CachedBatch]) -> None:
        self.batches, self._plans, self._forced = batches, plans, backends.forced()
        if any(plan.shapes for plan in plans):
            for batch in batches:
                batch.expect_shapes()
        stepped = {id(param) for batch in batches for param in batch.args.params}
        self._without_grad = [param for plan in plans for param in plan.params if id(param) not in stepped]
        self.forget()

    @staticmethod
    def possible(plans: list[StepPlan], batches: list[Batch]) -> bool:
        """Return whether the step that these batches made was nothing but calls of kernels."""
        if not batches or any(plan.folded or plan.fake_mode is not None for plan in plans):
            return False
        return all(map(_is_plain_call, batches))

    def fill(self, plans: list[StepPlan], groups: list[Group], state: States) -> bool:
        """Give the calls their gradients and states; return False if something else has changed."""
        if plans is not self._plans or len(groups) != len(plans) or backends.forced() != self._forced:
            return False
        if torch._C._len_torch_dispatch_stack() > 0:  # a mode may record calls for later, when tensors have moved
            return False
        if not all(map(StepPlan.fits_but_for_shapes, plans, groups)):
            return False
        if any([param.grad is not None for param in self._without_grad]):
            return False
        return all([batch.fill(state) for batch in self.batches])

    def step(self) -> bool:
        """Make the step with the filled arguments; return False, with nothing written, if an operator refuses it."""
        if len(self.batches) > 1 and not all([batch.step(check=True) for batch in self.batches]):
            return False
        return all([batch.step() for batch in self.batches])

    def forget(self) -> None:
        """Release the gradients and states, which need not outlive the step."""
        for batch in self.batches:
            batch.forget()


def _is_plain_call(batch: Batch) -> bool:
    if batch.reference or batch.seed is not None or not batch.plain:
        return False
    chosen = backends.choose("optim_step", batch.params[0].device)
    return chosen != "reference" and (_within_kernels(batch) if chosen == "native" else not batch.penalties)


def _within_kernels(args: StepArgs) -> bool:
    return all(map(applied_by_kernels, args.params, args.penalties))


def _accepted(args: StepArgs) -> bool:
    """Return whether the arguments are right; the operator writes nothing where they are not."""
    try:
        check_step(args)
    except (TypeError, ValueError):
        return False
    return True
