"""A controller that makes a network smaller while it trains, until it meets a budget."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from loco_ext.argument_checks import check_choice, check_count
from loco_ext.sparsity.budget.choose import Sizes
from loco_ext.sparsity.budget.importance import Taylor, by_norm
from loco_ext.sparsity.budget.shrink import bounds, check_budget
from loco_ext.sparsity.budget.structure import structure_of
from loco_ext.sparsity.compaction.compact import check_inputs, unwrapped

_MEMORY = 0.99  # decay of the importance from one step to the next


class Budget:
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        example_inputs: Tensor | Sequence[Any],
        macs: float | None = None,
        parameters: float | None = None,
        begin: int,
        end: int,
        updates: int = 20,
        importance: str = "taylor",
        kind: str = "half",
        granularity: str = "rings",
        least: int | Mapping[str, int] = 1,
        skip: Collection[str] = (),
        hold: bool = True,
        memory: float = _MEMORY,
    ) -> None:
        self.cost, self.share = check_budget(macs=macs, parameters=parameters)
        inputs = check_inputs(model, example_inputs)
        self.begin, self.end = check_count("begin", begin), check_count("end", end)
        if end < begin:
            raise ValueError(f"end: expected at least begin, {begin}, got {end}")
        self.updates = updates
        self.importance = importance
        self.hold, self.memory = hold, memory
        self.model = unwrapped(model)
        self.structure = structure_of(self.model, inputs, kind, granularity, skip)
        self.least = bounds(self.structure, least)
        self.taylor = Taylor(self.structure)
        self.steps = 0
        self.sizes: Sizes | None = None

    def step(self) -> None:
        """Count a step of the optimizer, and make the network smaller if it is time."""
        self.steps += 1
        if self.importance == "taylor" and self.steps <= self.end:
            self.taylor.add(lambda parameter: parameter.grad, self.memory)
        if self.begin <= self.steps <= self.end and (self.end - self.steps) % self.every == 0:
            self.sizes = self._choose(self._wanted())
        if self.sizes is not None and (self.hold or self.steps >= self.end or (self.end - self.steps) % self.every == 0):
            self.structure.zero(self._problem, self.sizes)

    @property
    def every(self) -> int:
        return max(1, (self.end - self.begin) // self.updates)

    def _wanted(self) -> float:
        """Return the share for the present step (Zhu and Gupta 2017, eq. 1)."""
        if self.steps >= self.end:
            return self.share
        left = 1.0 - (self.steps - self.begin) / (self.end - self.begin)
        return self.share + (1.0 - self.share) * left**3

    def _choose(self, share: float) -> Sizes:
        lost = self.taylor.lost() if self.importance == "taylor" else by_norm(self.structure)
        self._problem = problem = self.structure.problem(self.cost, lost, self.least)
        return problem.within(share * problem.cost(problem.whole()))
