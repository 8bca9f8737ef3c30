"""The path of penalty strengths: quality and cost of a network for increasingly strong penalties."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loco_ext.argument_checks import check_choice, check_count, check_number
from loco_ext.checkpoints import check_finite, load_checkpoint, save_checkpoint
from loco_ext.errors import first_line
from loco_ext.folders import owned
from loco_ext.fx.modules import copied
from loco_ext.input import NUMBER, check_form
from loco_ext.nn.computed import check_plain
from loco_ext.output import write_json
from loco_ext.penalties import GroupPenalty, KernelPenalty, RingPenalty, kernel_sizes, max_strength
from loco_ext.penalties.strengths import convolutions, is_empty
from loco_ext.sparsity.compaction.compact import compact
from loco_ext.sparsity.folded_norms import folded_penalties, zero_dead_filters
from loco_ext.sparsity.former_names import PRESENT_NAMES, FormerNames

PATHS = ("dense", "up", "down")
_MOST_TRIALS = 64  # doublings or halvings
_TRIAL = {"strength": int | float, "empty": bool}  # forms of the records that are stored
_POINT: dict[str, Any] = {
    **dict.fromkeys(("strength", "tau", "latency_before", "latency_after"), NUMBER),
    **{"metrics": dict, "refitted": dict | None, "macs": int, "kernels": dict},
}

Fit = Callable[[nn.Module, GroupPenalty], None]
Refit = Callable[[nn.Module, int], None]
Evaluate = Callable[[nn.Module], Mapping[str, float]]


@dataclass(frozen=True)
class FrontierPoint(FormerNames):
    """One network on the path.

    Attributes:
        strength: strength of the penalty.
        tau: groups with a norm of at most this were set to zero after training.
        metrics: results of ``evaluate``.
        refitted: results of ``evaluate`` for the compacted network after ``refit``; None without one.
        macs: multiply-accumulates for one sample (eq. 10), after compaction.
        latency_before: seconds of the network as trained; None if not measured.
        latency_after: seconds of the compacted network; None if not measured.
        kernels: number of filters of size 0, 1, 2, ..., by convolution.

    Example:
        >>> from loco_ext import sparsity
        >>> filters = {"0": [1, 0, 0, 7]}
        >>> point = sparsity.FrontierPoint(1e-3, 0.0, {"accuracy": 0.9}, None, 1000, None, None, filters)
        >>> point.metrics["accuracy"]
        0.9
    """

    strength: float
    tau: float
    metrics: dict[str, float]
    refitted: dict[str, float] | None
    macs: int
    latency_before: float | None
    latency_after: float | None
    kernels: dict[str, list[int]]


@dataclass(frozen=True)
class Frontier(FormerNames):
    """All points of :func:`frontier`, and the cost and metrics of the original model.

    Attributes:
        penalty: class name and settings of the penalty.
        path: the argument ``path``.
        macs: multiply-accumulates of the original model for one sample.
        latency: seconds of the original model; None if not measured.
        metrics: results of ``evaluate`` for the original model.
        trials: strengths tried in the search for the largest, and whether each removed everything.
        points: points in the order of training, then of tau.

    Example:
        >>> from loco_ext import sparsity
        >>> result = sparsity.Frontier(("RingPenalty", {}), "dense", 2000, None, {"accuracy": 0.95}, trials=[])
        >>> result.to_dict()["macs"], result.points
        (2000, [])
    """

    penalty: tuple[Any, ...]
    path: str
    macs: int
    latency: float | None
    metrics: dict[str, float]
    trials: list[tuple[float, bool]]
    points: list[FrontierPoint] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the frontier as plain data that JSON can hold."""
        return asdict(self)


def frontier(
    model: nn.Module,
    fit: Fit,
    evaluate: Evaluate,
    penalty: GroupPenalty,
    *,
    example_inputs: Any,
    strengths: Sequence[float] | None = None,
    points: int = 15,
    span: float = 1e-4,
    loss: Callable[[nn.Module], Tensor] | None = None,
    refit: Refit | None = None,
    path: str = "dense",
    taus: Sequence[float] = (0.0,),
    folded: bool = False,
    latency: bool = False,
    folder: str | Path | None = None,
) -> Frontier:
    """Train the model with many strengths of a penalty, and evaluate and compact each result.

    If no ``strengths`` are given, they range from "alpha_max", the smallest strength that removes everything, down to
    ``span`` times that, evenly spaced on a logarithmic scale. The search for alpha_max begins with the largest value of
    :func:`max_strength`. From there the strength is doubled until a training ends with all convolutions zero, or halved
    as long as one does.

    Every training has a warm start, in one of three ways:

    - ``"dense"``: start from the given model at every strength. All points are trained equally long.
    - ``"up"``: start from the previous point, strengths ascending; the first from the model. Later points are trained
      longer.
    - ``"down"``: start from the previous point, strengths descending; the first from the model.

    Take care with "down", the usual way for convex problems: consecutive convolutions that are zero have no gradient,
    and a network that starts empty stays empty or recovers badly. It suits models with one convolution, or strengths
    that begin below "alpha_max".

    Args:
        model: trained without the penalty; it is not changed.
        fit: trains a model in place with a penalty, deterministically: the same call must give the same result. Filters
            that a batch norm then multiplies by zero count as zero (:func:`zero_dead_filters`).
        evaluate: returns the metrics of a trained model, such as ``{"accuracy": 0.9}``.
        penalty: its strength is ignored; ``power=1`` if no strengths are given.
        example_inputs: a tensor or a tuple of tensors, as for :func:`compact`.
        strengths: numbers of at least 0, or None.
        points, span: number of strengths, and the ratio of the smallest to the largest, if none are given.
        loss: if no strengths are given, the loss of a model without the penalty, as for :func:`max_strength`.
        refit: trains a compacted network in place without the penalty, because a penalty also shrinks the weights that
            it keeps. The path continues from the network before refit. The second argument is the number of trainings
            that the path has still to come ("dense": 0), so that all points can get the same total training.
        path: one of the three ways above.
        taus: thresholds, with one point for each: groups whose norm is at most tau are set to zero after training (eqs.
            15 and 23). Penalties that are part of the loss need this; the exact prox does not (0).
        folded: whether ``fit`` penalises filters times the scale of the batch norm behind them
            (:func:`folded_penalties`). ``taus`` then apply to the norms of these products.
        latency: whether to measure the seconds that each network takes for the example, before and after compaction.
        folder: folder for finished points, if any; a call with the same arguments resumes from them. The weights of
            point 3, before any tau, are in ``point-03.pt``.

    Returns:
        The :class:`Frontier`: the model's own cost and metrics, and a :class:`FrontierPoint` for each strength and tau.

    Raises:
        TypeError, ValueError: the message names the argument; a parametrization or a hook computes a weight of
            ``model``; no strength removes everything; ``folder`` holds another path, damaged files, or weights that
            have diverged.
        OSError: ``folder`` cannot be written to, or another process is writing to it.

    Source:
        The draft "Optimal Convolutional Architectures Via Structured Sparsity Regularizers", sections 3.3 and 4.

    Example:
        >>> import torch
        >>> from loco_ext import optim, sparsity
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4, 1))
        >>> x = torch.randn(16, 1, 3, 3)
        >>> def loss(model):
        ...     return (model(x) - x.sum((1, 2, 3))[:, None]).square().mean()
        >>> def fit(model, penalty):
        ...     optimizer = optim.SGD(optim.parameter_groups(model, 0.0, penalty=penalty), lr=0.05)
        ...     for _ in range(5):
        ...         optimizer.zero_grad()
        ...         loss(model).backward()
        ...         optimizer.step()
        >>> path = sparsity.frontier(
        ...     model,
        ...     fit,
        ...     lambda model: {"loss": loss(model).item()},
        ...     sparsity.RingPenalty(1.0),
        ...     example_inputs=x,
        ...     strengths=[1e-3, 1e3],
        ... )
        >>> path.points[0].strength, path.points[0].kernels  # all four filters have size 0
        (1000.0, {'0': [4, 0, 0, 0]})
    """
    if not isinstance(penalty, RingPenalty | KernelPenalty):
        raise TypeError(f"penalty: expected a RingPenalty or a KernelPenalty, got {penalty!r}")
    _check(strengths, points, span, loss, path, taus)
    check_plain(model)
    folder = None if folder is None else Path(folder)
    store = _Store(folder)
    settings = type(penalty).__name__, *astuple(replace(penalty, strength=1.0))
    definition: dict[str, Any] = {
        "penalty": list(settings),
        "strengths": None if strengths is None else sorted(map(float, strengths)),
        **{"points": int(points), "span": span, "path": path, "taus": list(map(float, taus)), "latency": latency},
        **({"folded": True} if folded else {}),
    }
    with nullcontext() if folder is None else owned(folder):
        store.begin(definition)
        trials: list[tuple[float, bool]] = []
        if strengths is None:
            trials = _search(model, fit, penalty, loss, store)
            largest = min(strength for strength, empty in trials if empty)
            strengths = [largest * span ** (i / max(points - 1, 1)) for i in range(points)]
        measure = _Measure(evaluate, refit, example_inputs, folded, latency, store)
        found = replace(measure, refit=None)(model, replace(penalty, strength=0.0), 0.0, "model")
        result = Frontier(settings, path, found.macs, found.latency_before, found.metrics, trials)
        current = model
        for i, strength in enumerate(sorted(map(float, strengths), reverse=path != "up")):
            chosen = replace(penalty, strength=strength)
            current = store.trained(f"point-{i:02d}", copied(model if path == "dense" else current), fit, chosen)
            to_come = 0 if path == "dense" else len(strengths) - 1 - i
            result.points.extend(
                measure(current, chosen, tau, f"point-{i:02d}-{j}", to_come) for j, tau in enumerate(map(float, taus))
            )
        return result


def _check(
    strengths: Sequence[float] | None,
    points: int,
    span: float,
    loss: object,
    path: str,
    taus: Sequence[float],
) -> None:
    check_choice("path", path, PATHS)
    for name, values in (("strengths", strengths), ("taus", taus)):
        if values is None:
            continue
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise TypeError(f"{name}: expected a sequence of numbers, got {values!r}")
        if not values:
            raise ValueError(f"{name}: expected at least one number, got none")
        for i, value in enumerate(values):
            check_number(f"{name}[{i}]", value)
    check_count("points", points, 1)
    if strengths is not None:
        return
    if loss is None:
        raise TypeError("loss: expected a function where no strengths are given, got None")
    if not 0 < check_number("span", span) <= 1:
        raise ValueError(f"span: expected more than 0 and at most 1, got {span}")


def _search(
    model: nn.Module, fit: Fit, penalty: GroupPenalty, loss: Callable[[nn.Module], Tensor] | None, store: "_Store"
) -> list[tuple[float, bool]]:
    """Return all strengths tried, factors of 2 apart, and whether each left nothing; the last two differ in that."""
    assert loss is not None
    begin = max(max_strength(model, loss, penalty).values())
    if not begin > 0:
        raise ValueError("loss: expected one that depends on the convolutions, got gradients that are zero")
    trials: list[tuple[float, bool]] = []

    def empty(strength: float) -> bool:
        def left_nothing() -> dict[str, Any]:
            trained = copied(model)
            fit(trained, replace(penalty, strength=strength))
            zero_dead_filters(trained)
            return {"strength": strength, "empty": is_empty(trained)}

        found = store.remembered(f"trial-{len(trials):02d}", left_nothing, _TRIAL)
        trials.append((found["strength"], found["empty"]))
        return found["empty"]

    first, factor = empty(begin), 1.0
    while len(trials) < _MOST_TRIALS:
        factor *= 0.5 if first else 2.0
        if empty(begin * factor) != first:
            return trials
    raise ValueError(f"fit: expected that some strength leaves nothing and some smaller one something, tried {trials}")


@dataclass
class _Measure:
    """The settings shared by all points."""

    evaluate: Evaluate
    refit: Refit | None
    example_inputs: Any
    folded: bool
    latency: bool
    store: "_Store"

    def __call__(
        self, model: nn.Module, penalty: GroupPenalty, tau: float, name: str, to_come: int = 0
    ) -> FrontierPoint:
        """Return the point of the model with groups of at most ``tau`` set to zero."""
        record = self.store.remembered(name, lambda: asdict(self._point(model, penalty, tau, to_come)), _POINT)
        return FrontierPoint(**{entry: record[entry] for entry in _POINT})

    def _point(self, model: nn.Module, penalty: GroupPenalty, tau: float, to_come: int) -> FrontierPoint:
        kept = copied(model)
        kernels = {}
        penalties: dict[str, Any] = folded_penalties(kept, penalty) if self.folded and tau > 0 else {}
        with torch.no_grad():
            for layer, module in convolutions(kept).items():
                if tau > 0:
                    module.weight.copy_(penalties.get(layer, penalty).threshold(module.weight, tau))
                sizes = _sizes(penalty, module.weight)
                kernels[layer] = sizes.bincount(minlength=max(module.kernel_size) + 1).tolist()
        metrics = self._metrics(kept)
        latencies: tuple[float | None, float | None] = (None, None)
        if self.latency:
            _, report = compact(kept.eval(), self.example_inputs, cost="measured")
            latencies = report.latency_before, report.latency_after
        # The fastest network differs from run to run, but training needs to be reproducible.
        smaller, report = compact(kept.eval(), self.example_inputs, cost="macs", fold_norms=False)
        refitted = None
        if self.refit is not None:
            self.refit(smaller, to_come)
            refitted = self._metrics(smaller)
        return FrontierPoint(penalty.strength, tau, metrics, refitted, report.macs_after, *latencies, kernels)

    def _metrics(self, model: nn.Module) -> dict[str, float]:
        metrics = self.evaluate(model)
        if not isinstance(metrics, Mapping):
            raise TypeError(f"evaluate: expected a function that returns a dict, got {type(metrics).__name__}")
        return {key: float(value) for key, value in metrics.items()}


def _sizes(penalty: GroupPenalty, weight: Tensor) -> Tensor:
    """Return the remaining size of each filter; a KernelPenalty uses half rings, which allow every size."""
    if isinstance(penalty, RingPenalty):
        return kernel_sizes(weight, penalty.kind, first=penalty.first)
    return kernel_sizes(weight)


class _Store:
    """Records and weights by name, in a folder or not stored at all. A file that exists is complete."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def begin(self, definition: dict[str, Any]) -> None:
        """Record that the folder belongs to this path, or raise ValueError if it belongs to another one."""
        if self.folder is None:
            return
        found = self.remembered("path", lambda: definition, {})
        different = [key for key, value in definition.items() if found.get(key) != value]
        if different:
            raise ValueError(f"folder: {self.folder} holds a path that differs in {', '.join(different)}")

    def remembered(self, name: str, make: Callable[[], dict[str, Any]], form: dict[str, Any]) -> dict[str, Any]:
        """Return the record of this name; call ``make`` and store its result, of this form, if there is none."""
        if self.folder is None:
            return make()
        path = self.folder / f"{name}.json"
        if not path.exists():
            write_json(path, make())
        try:
            stored = json.loads(path.read_text())
            check_form(stored, dict)
            record = {PRESENT_NAMES.get(key, key): value for key, value in stored.items()}
            check_form(record, form)
        except ValueError as error:
            raise ValueError(f"folder: {path} is not a record of a path: {error}") from error
        return record

    def trained(self, name: str, model: nn.Module, fit: Fit, penalty: GroupPenalty) -> nn.Module:
        """Return ``model`` with the stored weights of this name; if there are none, train it and store its weights."""
        path = None if self.folder is None else self.folder / f"{name}.pt"
        if path is not None and path.exists():
            try:
                weights = load_checkpoint(path)
                check_finite(weights)
                model.load_state_dict(weights)
            except Exception as error:  # weights of another model may raise anything here
                raise ValueError(f"folder: {path} does not hold this model's weights: {first_line(error)}") from error
            return model
        fit(model, penalty)
        zero_dead_filters(model)
        if path is not None:
            save_checkpoint(path, model.state_dict())
        return model
