"""A smaller network of a given cost, made of a trained one."""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loco_ext.argument_checks import check_choice, check_count, check_number
from loco_ext.fx.modules import computed_tensors, copied
from loco_ext.sparsity.budget.choose import within
from loco_ext.sparsity.budget.importance import Loss, OfRings, by_function, by_norm, by_taylor
from loco_ext.sparsity.budget.size_problem import SizeProblem, Sizes
from loco_ext.sparsity.budget.structure import Structure, structure_of
from loco_ext.sparsity.compaction import Report, compact
from loco_ext.sparsity.compaction.compact import check_inputs, compacted, take_modes, unwrapped
from loco_ext.sparsity.compaction.split_mixed_convs import split_mixed_convs

_MOST_TRIES = 12
_ROUNDING = 5e-4  # largest relative rounding error of a number written with four digits
_GUESSES = 3  # tries in proportion to what was reached, before the budget is met; then the target is halved
_NEAR = 0.99  # share of the budget from which on no larger network is looked for


@torch.inference_mode(False)  # the result is for training, whatever mode the caller is in
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
    round_to: int = 1,
) -> tuple[nn.Module, Report]:
    """Return a smaller network of the given cost that keeps the most important filters and rings of a trained model.

    Each filter of each layer stays whole, loses its outermost rings, or is removed. All sizes together minimise
    ``price * cost + sum over layers of total * log(total / kept)``, where ``total`` is the importance of a layer and
    ``kept`` that of what stays, at the smallest price that meets the budget. Then channels are exchanged among layers
    and rings added, as long as less importance is lost. Channels that a residual connection adds up go together.

    Train the result further, at 0.1 to 1 times the largest learning rate of before. Its batch norms are not folded.

    Args:
        model: a trained model that torch.fx can trace; it is not changed.
        example_inputs: a tensor, or several arguments, as for :func:`compact`. Its size sets the numbers of pixels.
        macs, parameters, latency: the budget, exactly one of them: a share in (0, 1] of the model's own. MACs are those
            of :attr:`Report.macs_executed`, which include what cannot be made smaller. Latency is that of a forward
            pass on the example on this machine after :func:`compact`; layers and whole networks are timed for it.
        importance: "taylor": the first-order change of the loss, as a root mean square over ``batches``; for filters at
            the output of the batch norms behind them. "norm": the share of the layer's squared weights, scaled by the
            batch norm. Or a function of a layer's name and filters, ``(C_out, C_in/groups, *kernel_size)``, which gives
            numbers of at least 0 for each ring, ``(C_out, rings)``, the outermost first, on one scale for all layers.
        batches: for "taylor", run in eval mode: pairs of inputs, one argument or a sequence of several, and targets.
        loss: function of the model's output and the targets that returns a scalar.
        kind: "half" or "full" rings, see :func:`loco_ext.geometry.ring_index`.
        granularity: "rings", or "filters": each filter stays whole or is removed. Filters of convolutions that have
            groups, are transposed or called again have no rings either; groups stay or go with all their channels.
        least: number of filters that each layer keeps at least, or one by module name (1 for other modules).
        skip: names of modules all of whose filters stay whole, such as ``"layer1"`` or ``"layer1.0.conv1"``.
        round_to: numbers of channels become multiples of it, or stay. CPUs compute 8 or 16 at once, tensor cores 8.

    Returns:
        The network, made by :func:`compact`, and its report. It costs 99 to 100 % of the budget, or less if what would
        fill it loses more importance, as in narrow networks, or has none, as behind norms whose scales are still zero.

    Raises:
        TypeError, ValueError: the message names the argument; the model cannot be traced or timed, or nothing of it can
            be removed; no sizes meet the budget (the message has the lowest share that do). Nothing is changed then.

    Source:
        Costs: eq. 10 of the draft "Optimal Convolutional Architectures Via Structured Sparsity Regularizers". "taylor":
        Molchanov et al., "Importance Estimation for Neural Network Pruning" (2019), eqs. 8 and 11.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from loco_ext import sparsity
        >>> model = nn.Sequential(nn.Conv2d(3, 9, 5), nn.BatchNorm2d(9), nn.ReLU(), nn.Conv2d(9, 10, 3), nn.Flatten())
        >>> x, target = torch.randn(8, 3, 7, 7), torch.arange(8)
        >>> smaller, report = sparsity.shrink_to(model, x, macs=0.5, batches=[(x, target)])
        >>> report.macs_after <= 0.5 * report.macs_before, smaller(x).shape
        (True, torch.Size([8, 10]))
    """
    cost, share = check_budget(macs=macs, parameters=parameters, latency=latency)
    inputs = check_inputs(model, example_inputs)
    dense = split_mixed_convs(copied(unwrapped(model)).eval())
    structure = structure_of(dense, inputs, kind, granularity, skip)
    rounded, kept = check_count("round_to", round_to, 1), least_filters(structure, least)
    run = dense if len(inputs) == 1 else lambda given: dense(*given)
    lost = _lost(structure, run, importance, batches, loss)
    times = structure.times() if cost == "latency" else None
    problem = structure.problem(cost, lost, kept, rounded, times, followers_alone=importance == "taylor")
    found = BudgetSearch(dense, inputs, structure, problem, cost, share).search()
    is_compact = cost != "latency"
    network = found.network if is_compact else compacted(found.network, inputs, fold_norms=False, may_stay=False)[0]
    take_modes(network, model)
    return network, found.report


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


def least_filters(structure: Structure, least: int | Mapping[str, int]) -> dict[str, int]:
    """Return the number of filters that each layer keeps at least."""
    filters = {layer.name: len(layer.weight) for layer in structure.layers}
    given = least if isinstance(least, Mapping) else dict.fromkeys(filters, least)
    for name, count in given.items():
        if name not in filters:
            raise ValueError(f"least: expected names of convolution or linear layers, got {name!r}")
        check_count("least", count)
    return {name: min(given.get(name, 1), count) for name, count in filters.items()}


def _lost(
    structure: Structure,
    model: Callable[[Any], Any],
    importance: str | OfRings,
    batches: Iterable[Any],
    loss: Loss,
) -> dict[str, Tensor]:
    """Return the importance that each choice of a filter loses, ``(C_out, choices)``, by layer."""
    if callable(importance):
        return by_function(structure, importance)
    check_choice("importance", importance, ("taylor", "norm"))
    if importance == "norm":
        return by_norm(structure)
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches: expected pairs of inputs and targets, got {type(batches).__name__}")
    if not callable(loss):
        raise TypeError(f"loss: expected a function of the model's output and targets, got {type(loss).__name__}")
    return by_taylor(structure, model, batches, loss)


class UnreachableError(ValueError):
    """A budget below what the cheapest sizes of filters cost."""


@dataclass(frozen=True)
class Found:
    """A network that meets the budget.

    Args:
        network: the smaller network; for a latency, it is the model with zeros.
        report: its report, of the network as it will run.
        sizes: the sizes of its filters.
    """

    network: nn.Module
    report: Report
    sizes: Sizes


@dataclass(frozen=True)
class BudgetSearch:
    """Search for the sizes with which the compacted network just meets the budget.

    Compaction may remove more than was counted, such as channels that nothing reads; the target of the count follows.
    """

    model: nn.Module
    inputs: Sequence[Any]
    structure: Structure
    problem: SizeProblem
    cost: str
    share: float

    def guess(self) -> float:
        """Return the count, as a share of the model's, that should meet the budget, judged by one network."""
        sizes = self.sizes(self.share)
        counted = self.problem.cost(sizes) / self.problem.whole_cost
        return min(1.0, counted * self.share / self._reached(self._network(sizes)[1]))

    def check(self) -> None:
        """Raise UnreachableError unless the cheapest network meets the budget."""
        report = self._network(self.sizes(0.0))[1]
        least = self._reached(report)
        if least > self.share:
            raise self._unreachable(least, report)

    def search(self, target: float | None = None, near: float = _NEAR) -> Found:
        """Return a network that meets the budget and loses as little importance as is found.

        Args:
            target: share of the count that is tried first; by default the budget.
            near: share of the budget from which on a network is returned without looking for a larger one.

        Raises:
            UnreachableError: no sizes that are allowed meet the budget.
        """
        target = self.share if target is None else target
        low, high = 0.0, math.inf
        found: Found | None = None
        known: dict[tuple[bytes, ...], float] = {}  # what sizes reach, which rounded ones do that several targets have
        least = 1.0
        for tried in range(_MOST_TRIES):
            sizes = self.sizes(target)
            cost, whole = self.problem.cost(sizes), self.problem.whole_cost
            counted, cheapest = cost / whole, cost > target * whole  # no sizes that are allowed cost as little
            if cheapest and found is not None:
                break
            target = max(target, counted)
            key = tuple(chosen.tobytes() for chosen in sizes)
            if is_new := key not in known:
                network, report = self._network(sizes)
                if self.cost == "latency" and self._reached(report) <= self.share:
                    # A search also finds what was fast by chance, and is not when it is timed again.
                    report = max(report, self._network(sizes)[1], key=self._reached)
                known[key] = self._reached(report)
            reached = known[key]
            if reached <= self.share:
                low = target
                if is_new:
                    found = Found(network, report, sizes)
                if reached >= near * self.share or target == 1.0 or (target == self.share and reached == counted):
                    break
            else:
                high = target = counted  # larger targets up to this one give the same sizes
                least = min(least, reached)
                if cheapest:
                    break
            guess, stuck = min(1.0, target * self.share / reached), found is None and tried >= _GUESSES
            target = guess if low < guess < high and not stuck else (low + min(high, 1.0)) / 2
        if found is None:
            raise self._unreachable(least, report)
        return found

    def _unreachable(self, least: float, report: Report) -> UnreachableError:
        """Return the error of a budget that cannot be met; it names the least, rounded up, and why a model stays."""
        least, rest = min(1.0, (1 + _ROUNDING) * least), self.problem.rest / self.problem.whole_cost
        why = f" ({rest:.1%} are outside of layers that can be made smaller)" if rest and self.cost == "macs" else ""
        said = f"{self.cost}: expected at least {least:.4g}, the least reached{why}, got {self.share}"
        return UnreachableError(f"{said}; the model: {report.notes['model']}" if "model" in report.notes else said)

    def sizes(self, target: float) -> Sizes:
        """Return sizes whose count is at most this share of the model's, or the cheapest."""
        return within(self.problem, target * self.problem.whole_cost)

    def _network(self, sizes: Sizes) -> tuple[nn.Module, Report]:
        """Return the network that is left of sizes, and its report; for a latency, it is the model with zeros."""
        model, structure = copy.deepcopy((self.model, self.structure), computed_tensors(self.model))
        structure.masks(sizes).apply()
        if self.cost == "latency":  # timed as it will run, with folded batch norms
            return model, compact(model, self.inputs)[1]
        return compact(model, self.inputs, cost="macs", fold_norms=False)

    def _reached(self, report: Report) -> float:
        """Return the share of the model's cost that is left."""
        if self.cost == "macs":  # zeros that the network still has count, as they may be trained
            return report.macs_executed / report.macs_before
        if self.cost == "parameters":
            return report.parameters_after / report.parameters_before
        if not report.latency_before or report.latency_after is None:
            raise ValueError("latency: expected a model of which a smaller one can be timed, got none")
        return report.latency_after / report.latency_before
