"""Steps that differ from the one before in gradients and hyper-parameters alone, as nearly all steps do.

Collecting hundreds of tensors from groups and states, and handing them over, costs more than stepping them where they
are small. A Repeat keeps what was collected; the next step only makes sure that it would collect the very same objects.
"""

from __future__ import annotations

from itertools import repeat
from operator import is_, itemgetter
from typing import Any

from torch import Tensor

from loco_ext.ops.held import Held
from loco_ext.ops.penalties import StepPenalty
from loco_ext.ops.shrink import lies_by_kernels
from loco_ext.optim.plan import Batch, Plan, Rule, same_objects


class Repeat:
    """The only batch of a step, for further steps.

    Args:
        rule, batch: the step's; the batch must have lost its local tensors' wrappers, see :meth:`possible`.
        plans: of all groups, each of which has added a row to the batch.
        state: the optimizer's.
        state_names: keys of the states that the batch holds.
    """

    def __init__(
        self,
        rule: Rule,
        batch: Batch,
        plans: list[Plan],
        state: dict[Tensor, dict[str, Any]],
        state_names: tuple[str, ...],
    ) -> None:
        batch.grads, batch.first, batch.created = [], [], []
        self.rule, self.batch, self.plans = rule, batch, plans
        present = set(map(id, batch.params))
        self.absent = [param for plan in plans for param in plan.params if id(param) not in present]
        # The states of all parameters, those without a gradient included.
        self.owners, self.owned = list(state), list(state.values())
        self.states = [state[param] for param in batch.params] if state_names else []
        tensors = [*filter(None, batch.states), *filter(None, [batch.steps])]
        self.tensors = list(zip(state_names, tensors, strict=True))
        lists = (batch.params, *batch.states, batch.steps, batch.maps)
        numbers = [p.number_for(batch.params[0]) if isinstance(p, StepPenalty) else 0 for p in batch.penalties]
        batch.held = Held(lists, (batch.group_index, batch.map_index, numbers, batch.ordinals))

    @staticmethod
    def possible(rule: Rule, batch: Batch) -> bool:
        """Whether the step runs in the compiled library, on tensors that are their own storage."""
        possible = batch.plain and not rule.reference and Held.possible(batch.params[0])
        return possible and all(
            penalty is None or (isinstance(penalty, StepPenalty) and lies_by_kernels(param))
            for param, penalty in zip(batch.params, batch.penalties, strict=False)
        )

    def new_grads(
        self, plans: list[Plan], rules: list[Rule], state: dict[Tensor, dict[str, Any]]
    ) -> list[Tensor] | None:
        """The gradients of a step that repeats this one; None if anything else has changed."""
        batch = self.batch
        if plans is not self.plans or not self._follows(rules) or not Held.possible(batch.params[0]):
            return None
        grads = [param.grad for param in batch.params]
        if any(map(is_, grads, repeat(None))):
            return None
        on_gpu = batch.params[0].is_cuda
        if not all([grad.is_cuda == on_gpu for grad in grads]):  # type: ignore[union-attr]
            return None
        if any([param.grad is not None for param in self.absent]) or not self._has_states(state):
            return None
        return grads  # type: ignore[return-value]

    def _follows(self, rules: list[Rule]) -> bool:
        """Whether all groups follow the batch's rule; the step of stochastic rounding goes on."""
        return rules.count(rules[0]) == len(rules) and rules[0][:-1] == self.rule[:-1]

    def _has_states(self, state: dict[Tensor, dict[str, Any]]) -> bool:
        if not same_objects(state, self.owners) or not same_objects(state.values(), self.owned):
            return False
        try:
            return all(same_objects(tensors, [*map(itemgetter(name), self.states)]) for name, tensors in self.tensors)
        except KeyError:
            return False
