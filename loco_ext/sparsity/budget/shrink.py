"""A smaller network of a given cost, made of a trained one."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from loco_ext.argument_checks import check_choice, check_count, check_number
from loco_ext.sparsity.budget.choose import LeastCost, Problem
from loco_ext.sparsity.budget.importance import Loss, OfRings, by_function, by_norm, by_taylor
from loco_ext.sparsity.budget.structure import Structure, structure_of
from loco_ext.sparsity.compaction import Report, compact
from loco_ext.sparsity.compaction.compact import check_inputs, copied, unwrapped

_TRIES, _BELOW = 12, 0.99


def shrink_to(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Any],
    *,
    macs: float | None = None,
    parameters: float | None = None,
    latency: float | None = None,
    importance: str | OfRings = "taylor",
    batches: Iterable[Any] = (),
    loss: Loss = F.cross_entropy,
    kind: str = "half",
    granularity: str = "rings",
    least: int | Mapping[str, int] = 1,
    skip: Collection[str] = (),
) -> tuple[nn.Module, Report]:
    cost, share = check_budget(macs=macs, parameters=parameters, latency=latency)
    inputs = check_inputs(model, example_inputs)
    copy = copied(unwrapped(model)).eval()
    structure = structure_of(copy, inputs, kind, granularity, skip)
    problem = structure.problem(
        "parameters" if cost == "parameters" else "macs",
        _lost(structure, copy, importance, batches, loss),
        bounds(structure, least),
    )
    network, report = _Search(copy, inputs, structure, problem, cost, share).run()
    for name, module in network.named_modules():
        module.training = model.training
    return network, report


def check_budget(**budgets: float | None) -> tuple[str, float]:
    """Return the name of the only budget that is given, and its share."""
    given = {name: value for name, value in budgets.items() if value is not None}
    if len(given) != 1:
        raise ValueError(f"{', '.join(budgets)}: expected exactly one of them, got {', '.join(given) or 'none'}")
    ((name, value),) = given.items()
    share = check_number(name, value)
    if not 0 < share <= 1:
        raise ValueError(f"{name}: expected a share of the model's own, in (0, 1], got {value!r}")
    return name, share


def bounds(structure: Structure, least: int | Mapping[str, int]) -> dict[str, int]:
    """Return the number of filters that each layer keeps at least."""
    names = [layer.name for layer in structure.layers]
    if not isinstance(least, Mapping):
        count = check_count("least", least)
        return {layer.name: min(count, len(layer.module.weight)) for layer in structure.layers}
    for name, count in least.items():
        if name not in names:
            raise ValueError(f"least: expected names of convolution or linear layers, got {name!r}")
        check_count("least", count)
    return {name: least.get(name, 1) for name in names}


def _lost(
    structure: Structure, model: nn.Module, importance: str | OfRings, batches: Iterable[Any], loss: Loss
) -> dict[str, Tensor]:
    """Return what each choice of each filter loses."""
    if callable(importance):
        return by_function(structure, importance)
    check_choice("importance", importance, ("taylor", "norm"))
    if importance == "norm":
        return by_norm(structure)
    several = list(batches)
    if not several:
        raise ValueError("batches: expected at least one pair of inputs and targets for importance='taylor', got none")
    return by_taylor(structure, model, several, loss)


class _Search:
    """Search for the sizes with which the compacted network just meets the budget.

    Compaction may remove more than was counted, such as constant channels; the target for the count follows it.
    """

    def __init__(
        self, model: nn.Module, inputs: Sequence[Any], structure: Structure, problem: Problem, cost: str, share: float
    ) -> None:
        self.model, self.inputs, self.structure, self.problem = model, inputs, structure, problem
        self.cost, self.share = cost, share

    def run(self) -> tuple[nn.Module, Report]:
        """Return the network and its report.

        Raises:
            ValueError: no sizes that are allowed meet the budget.
        """
        low, high, target = 0.0, 1.0, self.share
        best, reached = None, 1.0
        for _ in range(_TRIES):
            network, report = self.network(target)
            reached = _reached(report, self.cost)
            if reached <= self.share:
                best, low = (network, report), target
                if reached >= _BELOW * self.share or target == 1.0:
                    break
            else:
                high = target
            guess = target * self.share / reached
            target = guess if low < guess < high else (low + high) / 2
        if best is None:
            raise ValueError(f"{self.cost}: expected at least {reached:.3g}, which is the least found, got {self.share}")
        return best

    def network(self, target: float) -> tuple[nn.Module, Report]:
        """Return the compacted network whose count is at most this share of the model's."""
        try:
            sizes = self.problem.within(target * self.problem.cost(self.problem.whole()))
        except LeastCost as error:
            least = error.cost / self.problem.cost(self.problem.whole())
            raise ValueError(f"{self.cost}: expected at least about {least:.3g}, which is what must stay, got {self.share}") from None
        zeroed = copy.deepcopy((self.model, self.structure))
        zeroed[1].zero(self.problem, sizes)
        cost = "measured" if self.cost == "latency" else "macs"
        network, report = compact(zeroed[0], self.inputs, cost=cost, fold_norms=False)
        if self.cost == "latency":  # of the network as it will run
            _, report = compact(zeroed[0], self.inputs)
        return network, report


def _reached(report: Report, cost: str) -> float:
    """Return the share of the model's cost that is left."""
    if cost == "latency":
        if not report.latency_before or report.latency_after is None:
            raise ValueError("latency: expected a model whose forward pass can be timed, got none that could be made smaller")
        return report.latency_after / report.latency_before
    if cost == "macs":
        return report.macs_after / report.macs_before
    return report.parameters_after / report.parameters_before
