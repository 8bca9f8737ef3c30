"""The tensors of an optimizer's last step, for a next one that differs in gradients and hyper-parameters alone.

Where parameters are small, collecting them and their states costs more than stepping them. A StepCache refers to
tensors in Python only, as the optimizer itself does, and knows no pointer, size or stride: the operator reads and checks
all of them in each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor

from loco_ext.optim.options import Group
from loco_ext.optim.plan import Batch, BatchKey, Plan, same_objects

States = Mapping[Tensor, dict[str, Any]]


class StepCache:
    """The batch of a step that had no other, and everything that the next step must find unchanged.

    Args:
        plans: the plans of all groups, each of which has a row in the batch.
        key, batch: of the step, which has been made; the batch is changed.
        state: the optimizer's state.
        names: the keys of the batch's lists of states, and of its steps if it has any, in each entry of ``state``.
    """

    def __init__(self, plans: list[Plan], key: BatchKey, batch: Batch, state: States, names: Sequence[str]) -> None:
        self.plans, self.key, self.batch, self.names = plans, key, batch, names
        batch.first, batch.created = [], []
        if any(plan.shapes for plan in plans):
            numbers = [float(number) for param in batch.params for number in (param.dim(), *param.shape)]
            batch.shapes = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        stepped = set(map(id, batch.params))
        self._without_grad = [param for plan in plans for param in plan.params if id(param) not in stepped]
        self._owners, self._owned = list(state), list(state.values())
        self._states = [state[param] for param in batch.params] if names else []
        self.forget()

    @staticmethod
    def possible(plans: list[Plan], batches: dict[BatchKey, Batch]) -> bool:
        """Return whether the step has one batch, of all groups, and nothing before or after it."""
        if len(batches) != 1:
            return False
        (batch,) = batches.values()
        if not batch.plain or len(batch.rows) != len(plans):
            return False
        return not any(plan.folded or plan.preparations or plan.fake_mode is not None for plan in plans)

    def fill(self, plans: list[Plan], groups: list[Group], keys: list[BatchKey], state: States) -> bool:
        """Give the batch its gradients and states; return False if something else has changed."""
        batch = self.batch
        if plans is not self.plans or len(groups) != len(plans):
            return False
        if keys.count(keys[0]) != len(keys) or keys[0][:-1] != self.key[:-1]:
            return False
        if not all(map(Plan.fits_but_for_shapes, plans, groups)):
            return False
        if not same_objects(state, self._owners) or not same_objects(state.values(), self._owned):
            return False
        grads = [param.grad for param in batch.params]
        if any(map(is_, grads, repeat(None))) or any([param.grad is not None for param in self._without_grad]):
            return False
        try:
            lists = [[states[name] for states in self._states] for name in self.names]
        except KeyError:
            return False
        batch.grads = grads  # type: ignore[assignment]
        batch.steps = lists[self.key.states] if len(lists) > self.key.states else []
        batch.states = lists[: self.key.states]
        return True

    def forget(self) -> None:
        """Release the gradients and states, which need not outlive the step."""
        self.batch.grads, self.batch.states, self.batch.steps = [], [], []
