"""A controller that makes a network smaller while it trains, until it meets a budget."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_map_only

from loco_ext.argument_checks import check_choice, check_count
from loco_ext.fx.modules import computed_tensors, device_of
from loco_ext.sparsity.budget.choose import within
from loco_ext.sparsity.budget.importance import Taylor, by_norm
from loco_ext.sparsity.budget.layer_time import LayerTime
from loco_ext.sparsity.budget.penalty import CostPenalty
from loco_ext.sparsity.budget.shrink import BudgetSearch, check_budget, least_filters
from loco_ext.sparsity.budget.size_problem import SizeProblem, Sizes
from loco_ext.sparsity.budget.structure import Masks, structure_of
from loco_ext.sparsity.compaction.compact import check_inputs, unwrapped

Shared = TypeVar("Shared")

# The keys of a state, and the types of their values.
_STATE: dict[str, Any] = {"steps": int, "target": float, "importance": Mapping, "removed": list}
_STATE |= {"sizes": list | None, "penalty": tuple | list | None}
_ADDED: dict[str, Any] = {"round_to": int, "begin": int, "end": int, "budget": tuple | list}  # older states lack them

_NONZERO = 1e-3  # stands for zeros that may be trained
_DECAY = 0.99  # decay of the importance from one step to the next


class Budget:
    """Makes a network smaller while it trains, so that it meets a budget by step ``end``; training then recovers.

    Call :meth:`step` after each step of the optimizer and before gradients are set to zero. From step ``begin`` on, the
    sizes of all filters are chosen as by :func:`shrink_to`, for a budget that falls from 1 to the target share as a
    cubic function of time, fast at first. Filters and rings that are not kept are set to zero, with the shifts of the
    batch norms behind them. Until ``end``, they come back with their former values if a later choice prefers them.
    From ``end`` on they stay zero.

    Batch norms are not folded. At any time after ``end``, :func:`compact` with ``fold_norms=False`` returns the small
    network for further training. With the default, it returns the network for inference.

    It works with any optimizer, GradScaler, torch.compile, and in several processes, where the first process chooses
    for all. Create it after the process group.

    Args:
        model: it is changed in place, by :meth:`step` only.
        optimizer: the optimizer of the model's parameters.
        example_inputs: a tensor, or several arguments, for one call of the model, as for :func:`shrink_to`.
        macs, parameters, latency: the budget, exactly one of them: a share in (0, 1] of the model's own, counted as by
            :attr:`Report.macs_executed` and ``parameters_after``; or of its latency on the example in eval mode. At
            ``end``, the model is compacted to see whether it meets the budget, and again with other sizes until it
            does. Zeros that come from training, not from the budget, count like other weights, because they may become
            non-zero again. For a latency, layers and two compacted networks are timed at the beginning, and several
            networks at ``end``.
        begin, end: numbers of steps, ``end`` at least 1. Half of the training is a good ``end``: the learning rate is
            still high.
        updates: the most times that sizes are chosen before ``end``, at least 1.
        importance: "taylor": as for :func:`shrink_to`, from the gradients of training, in a mean that decays by 1 % a
            step; or "norm".
        method: "pruning" as above, or "penalty": from ``begin`` to ``end``, the prox of a penalty shrinks all filters
            in each step, in proportion to their costs. A controller adjusts the penalty's strength so that the zeros
            follow the same schedule. At ``end``, sizes are chosen as above. This method is slower, and its networks
            were worse in our study.
        kind, granularity, least, skip, round_to: as for :func:`shrink_to`.

    Raises:
        TypeError, ValueError: the message names the argument; ``end`` is smaller than ``begin``; the optimizer lacks a
            weight that trains, of a layer not in ``skip``; the budget is below the cost of what must stay; the model
            cannot be timed.

    Source:
        Zhu and Gupta, "To prune, or not to prune" (2017), eq. 1, for the schedule.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from loco_ext import sparsity
        >>> model = nn.Sequential(nn.Conv2d(3, 9, 5), nn.BatchNorm2d(9), nn.ReLU(), nn.Conv2d(9, 10, 3), nn.Flatten())
        >>> x, target = torch.randn(8, 3, 7, 7), torch.arange(8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> budget = sparsity.Budget(model, optimizer, example_inputs=x, macs=0.5, begin=2, end=6)
        >>> for _ in range(10):
        ...     optimizer.zero_grad()
        ...     nn.functional.cross_entropy(model(x), target).backward()
        ...     optimizer.step()
        ...     budget.step()
        >>> smaller, report = sparsity.compact(model, x, cost="macs")
        >>> 0.45 < report.macs_after / report.macs_before <= 0.5
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        example_inputs: Tensor | Sequence[Any],
        macs: float | None = None,
        parameters: float | None = None,
        latency: float | None = None,
        begin: int,
        end: int,
        updates: int = 20,
        importance: str = "taylor",
        method: str = "pruning",
        kind: str = "half",
        granularity: str = "rings",
        least: int | Mapping[str, int] = 1,
        skip: Collection[str] = (),
        round_to: int = 1,
    ) -> None:
        self.cost, self.share = check_budget(macs=macs, parameters=parameters, latency=latency)
        inputs = check_inputs(model, example_inputs)
        self.begin, self.end = check_count("begin", begin), check_count("end", end, 1)
        if end < begin:
            raise ValueError(f"end: expected at least begin, {begin}, got {end}")
        check_choice("importance", importance, ("taylor", "norm"))
        check_choice("method", method, ("pruning", "penalty"))
        self.importance, self.updates = importance, check_count("updates", updates, 1)
        self._structure = structure_of(model, inputs, kind, granularity, skip)
        self._least, self._round_to = least_filters(self._structure, least), check_count("round_to", round_to, 1)
        self._taylor = Taylor(self._structure)
        may_go = [layer for layer in self._structure.layers if not layer.kept]
        _check_optimizer(optimizer, [(layer.name, layer.module.weight) for layer in may_go])
        self.steps = 0
        self._set_sizes(None)
        self._model, self._inputs, self._target = unwrapped(model), inputs, self.share  # share of what is counted
        self._times: list[LayerTime] | None = None
        if self.cost == "latency":
            self._times = _on_rank_0(self._structure.times)
            self._target = _on_rank_0(self._first_target)
        else:
            self._search().search(near=0.0)  # raises if that is impossible
        self._penalty = CostPenalty(self._structure, self._problem(), optimizer) if method == "penalty" else None

    def step(self) -> None:
        """Count a step of the optimizer; make the network smaller when an update is due.

        Raises:
            RuntimeError: a layer has had no finite gradient, or all layers only zeros, by the time that sizes are
                chosen by "taylor".
            ValueError: no network meets the budget at ``end``.
        """
        self.steps += 1
        if self.steps <= self.end and self.importance == "taylor":
            self._taylor.add(lambda parameter: parameter.grad, _DECAY)
        every = max(1, -(-(self.end - self.begin) // self.updates))
        due = self.begin <= self.steps <= self.end and (self.end - self.steps) % every == 0
        if self._penalty is not None and self.begin <= self.steps < self.end:
            self._penalty.shrink()
            if due:
                self._penalty.adjust(self._share_at(self.steps + every), every)
        elif due:
            self._masks.restore()
            try:
                self._set_sizes(_on_rank_0(self._sizes_now))
            finally:
                self._masks.cut()
        if self.steps >= self.end:
            self._masks.removed.clear()
        self._masks.apply()

    @property
    def share_wanted(self) -> float:
        """The share of the MACs or parameters that the network may have after the current step."""
        return self._share_at(self.steps)

    def _share_at(self, step: int) -> float:
        """Return the share that the network may have after a step."""
        if step < self.begin:
            return 1.0
        left = 0.0 if step >= self.end else 1.0 - (step - self.begin) / (self.end - self.begin)
        return self._target + (1.0 - self._target) * left**3

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the controller; the model's state dict has the weights."""
        sizes = None if self._sizes is None else [torch.from_numpy(chosen) for chosen in self._sizes]
        penalty = None if self._penalty is None else self._penalty.state()
        return {
            "budget": (self.cost, self.share),
            **{"steps": self.steps, "begin": self.begin, "end": self.end},
            **{"target": self._target, "round_to": self._round_to},
            "penalty": penalty,
            "importance": self._taylor.state(),
            "sizes": sizes,
            "removed": self._masks.removed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a controller of the same model and budget; load the model's own state as well.

        ``begin`` and ``end`` are taken from the state, so that zeros stay zero if the training is made longer.

        Raises:
            TypeError, ValueError: it is no such state, or one of another model or budget. Nothing is changed then.
        """
        self._check_state(state)
        self._taylor.load(state["importance"])
        self.steps, self._target, sizes = state["steps"], state["target"], state["sizes"]
        self.begin, self.end = self._span(state)
        self._round_to = state.get("round_to", self._round_to)
        self._set_sizes(None if sizes is None else _arrays(sizes))
        self._masks.removed = list(state["removed"])
        if self._penalty is not None:
            self._penalty.load(state["penalty"])

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise unless the state has all that is loaded, and sizes of this model's filters."""
        if not isinstance(state, Mapping):
            raise TypeError(f"state: expected a dict from Budget.state_dict, got {type(state).__name__}")
        if missing := _STATE.keys() - state.keys():
            raise ValueError(
                f"state: expected one from Budget.state_dict, got one without {', '.join(sorted(missing))}"
            )
        for name, kind in (_STATE | _ADDED).items():
            if name in state and not isinstance(state[name], kind):
                raise TypeError(f"state: expected {name} as Budget.state_dict returns it, got {state[name]!r}")
        begin, end = self._span(state)
        bounds = {"steps": 0, "begin": 0, "end": max(1, begin), "round_to": 1}
        for name, least in bounds.items():
            if state.get(name, least) < least:
                raise ValueError(f"state: expected {name} of at least {least}, got {state[name]}")
        if not 0 < state["target"] <= 1:
            raise ValueError(f"state: expected a target in (0, 1], got {state['target']}")
        if tuple(state.get("budget", (self.cost, self.share))) != (self.cost, self.share):
            raise ValueError(f"state: expected one of the budget {self.cost}, {self.share}, got {state['budget']}")
        sizes, removed = state["sizes"] or [], state["removed"]
        if not all(isinstance(each, Tensor) for each in (*state["importance"].values(), *sizes, *removed)):
            raise TypeError("state: expected tensors in importance, sizes and removed, got others")
        if not all(each.isfinite().all() for each in state["importance"].values()):
            raise ValueError("state: expected finite importance, got infinity or NaN")
        if any(each.dtype != torch.int64 for each in sizes):
            raise TypeError(f"state: expected sizes in int64, got {[each.dtype for each in sizes]}")
        if (state["penalty"] is None) != (self._penalty is None):
            mine, other = ("pruning", "penalty") if self._penalty is None else ("penalty", "pruning")
            raise ValueError(f"state: expected one of method {mine!r}, got {other!r}")
        if self._penalty is not None:
            self._penalty.check(state["penalty"])
        if state["sizes"] is not None:
            wanted = [(len(layer.weight), len(layer.taps)) for layer in self._structure.layers]
            given = [(each.numel(), int(each.max()) + 1 if each.numel() else 0) for each in sizes]
            few = any(each.numel() and int(each.min()) < 0 for each in sizes) or len(given) != len(wanted)
            if few or any(a != b or n > m for (a, n), (b, m) in zip(given, wanted, strict=True)):
                raise ValueError(
                    f"state: expected sizes of {[filters for filters, _ in wanted]} filters, got of "
                    f"{[filters for filters, _ in given]}, or of other rings"
                )
        shapes = [] if state["sizes"] is None else self._structure.masks(_arrays(sizes)).shapes()
        if (removed or state["steps"] < end) and [each.shape for each in removed] != shapes:
            raise ValueError(
                f"state: expected removed values of shapes {[tuple(shape) for shape in shapes]}, got others"
            )

    def _span(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Return the begin and the end of a state; of an older one, those of this controller unless it has ended."""
        steps, ended = state["steps"], state["sizes"] is not None and not state["removed"]
        end = state.get("end", max(1, min(self.end, steps)) if ended else self.end)
        return state.get("begin", min(self.begin, end)), end

    def _set_sizes(self, sizes: Sizes | None) -> None:
        """Keep filters at these sizes from now on; None leaves them whole."""
        self._sizes, self._masks = sizes, Masks() if sizes is None else self._structure.masks(sizes)

    def _problem(self) -> SizeProblem:
        """Return the problem of choosing sizes with the importance known by now."""
        is_first_order = self.importance == "taylor" and self.steps > 0
        if not is_first_order:
            lost = by_norm(self._structure)
        elif unknown := self._taylor.unknown():
            raise RuntimeError(
                f"step: expected finite gradients, got none for {', '.join(unknown)}, or only zeros; call it after the "
                "optimizer's step and before zero_grad, and name layers that do not train in skip"
            )
        else:
            lost = self._taylor.lost()
        arguments = self.cost, lost, self._least, self._round_to, self._times
        return self._structure.problem(*arguments, followers_alone=is_first_order)

    def _sizes_now(self) -> Sizes | None:
        """Return the sizes that the present step is to leave: at the end those that meet the budget when compacted.

        All filters stay whole as long as no gradients have been finite, as in GradScaler's first steps.
        """
        if self.steps == self.end:
            return self._search().search(self._target).sizes
        if self.importance == "taylor" and self._taylor.has_overflowed():
            return None
        problem = self._problem()
        return within(problem, self.share_wanted * problem.whole_cost)

    def _first_target(self) -> float:
        """Return the count that should meet the latency, a share; raise ValueError if the cheapest network does not."""
        search = self._search()
        search.check()
        return search.guess()

    @torch.no_grad()
    def _search(self) -> BudgetSearch:
        """Return the search for the share of what is counted with which the compacted network meets the budget.

        Zeros of the model, such as a penalty makes, are none in its copy: what sizes do not leave out may be trained.
        """
        model, structure = copy.deepcopy((self._model, self._structure), computed_tensors(self._model))
        inputs = tree_map_only(Tensor, lambda x: x.to(device_of(model)), tuple(self._inputs))  # it may have been moved
        for parameter in model.parameters():
            parameter.masked_fill_(parameter == 0, _NONZERO)
        return BudgetSearch(model.eval(), inputs, structure, self._problem(), self.cost, self.share)


def _arrays(sizes: Sequence[Tensor]) -> Sizes:
    return [chosen.cpu().numpy() for chosen in sizes]


def _check_optimizer(optimizer: torch.optim.Optimizer, weights: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise unless the optimizer has all weights that train."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, weight in weights:
        if id(weight) not in owned and weight.requires_grad:
            raise ValueError(
                f"optimizer: expected one of the model's parameters, got one without {name}.weight; name layers that "
                "another optimizer trains in skip"
            )


def _on_rank_0(find: Callable[[], Shared]) -> Shared:
    """Return the result of rank 0 in all processes, or raise its error in all of them."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return find()
    shared: list[Any] = [None, None]
    if distributed.get_rank() == 0:
        try:
            shared[0] = find()
        except Exception as error:
            shared[1] = error
    distributed.broadcast_object_list(shared, src=0)
    if shared[1] is not None:
        raise shared[1]
    return shared[0]
