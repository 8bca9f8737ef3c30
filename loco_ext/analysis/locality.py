"""How far trained weights follow locality, and the locality-promoting decay that they call for.

Source: Schneider, "Locality-Promoting Representation Learning" (2022), "the paper" below. A *matrix* is the spatial
kernel of one output and one input channel; its taps fall in the distance classes of
:func:`loco_ext.geometry.distance_classes`.
"""

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from scipy.special import stdtr
from torch import Tensor, nn

from loco_ext.analysis.checks import check_choice, check_number
from loco_ext.analysis.kernels import Inputs, Model, kernels
from loco_ext.geometry import distance_classes


@dataclass(frozen=True)
class Cell:
    """One cell of the paper's Table 4: by how much weights at one distance exceed those at the next.

    Attributes:
        part: "all", "lower" or "upper", the layers that count.
        distances: of the two classes from the centre, the nearer one first.
        mean: of the difference, in standard deviations of its layer.
        standard_error: of ``mean``.
        p_greater: p-value of the one-sided t-test that the mean is above 0.
        p_two_sided: p-value of the t-test that it is not 0.
        matrices: how many were compared.
        layers: in how many layers.

    >>> Cell("all", (0.0, 1.0), 0.5, 0.1, 1e-4, 2e-4, matrices=100, layers=2).mean
    0.5
    """

    part: str
    distances: tuple[float, float]
    mean: float
    standard_error: float
    p_greater: float
    p_two_sided: float
    matrices: int
    layers: int


@dataclass(frozen=True)
class LocalityStatistics:
    """What :func:`locality_statistics` returns; ``dataclasses.asdict`` turns it into plain data for JSON.

    Attributes:
        weighting: as given.
        cells: by distances, then "all", "lower", "upper".
        skipped: names of layers that could not be standardised for at least one pair of classes, in forward order.

    >>> LocalityStatistics("halves", cells=(), skipped=("features.0",)).skipped
    ('features.0',)
    """

    weighting: str
    cells: tuple[Cell, ...]
    skipped: tuple[str, ...]


def locality_statistics(
    model: Model, weighting: str = "halves", example_inputs: Inputs | None = None
) -> LocalityStatistics:
    """Tests whether weights decrease with distance from the centre (the paper's section 7.1, eq. 7.1 and Table 4).

    For each matrix and each pair of consecutive distance classes, the difference ``s`` is the mean signed weight of the
    nearer class minus that of the farther one; it is divided by the population standard deviation of ``s`` in its layer
    and averaged. A layer counts for the pairs that are consecutive in its own kernel: a 3x3 kernel has two, a 5x5
    kernel five. There is a cell for all layers that have the pair, for the lower and for the upper half of them in
    forward order; the lower half takes the middle one of an odd count, and the upper half of one layer has no cell.

    A layer whose ``s`` does not vary by more than rounding, one of a single matrix for example, cannot be standardised:
    it is left out before halving and listed in ``skipped``.

    Args:
        model: a module or a mapping of names to tensors, such as a state dict; see
            :func:`loco_ext.analysis.kernels.kernels` for what counts as a convolution.
        weighting: "matrices" averages over all matrices, as eq. 7.1 does. "layers" takes the mean of the layers' means.
            "halves" averages over all matrices of a half, and takes the mean of the two halves for "all", as every row
            of Table 4 does.
        example_inputs: None takes layers in order of registration as the forward order; a tensor or tuple of tensors
            finds the order by one forward pass.

    Returns:
        Cells with the mean, its standard error, and p-values. An average over matrices has the one-sample t-test; a
        mean of means combines standard errors, with Welch-Satterthwaite degrees of freedom.

    Raises:
        TypeError, ValueError: as :func:`loco_ext.analysis.kernels.kernels`, or an unknown ``weighting``.

    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    >>> with torch.no_grad():
    ...     for layer in (model[0], model[2]):
    ...         layer.weight[..., 1, 1] += 1
    >>> statistics = locality_statistics(model)
    >>> [(cell.part, cell.p_greater < 0.001) for cell in statistics.cells if cell.distances == (0, 1)]
    [('all', True), ('lower', True), ('upper', True)]
    """
    check_choice("weighting", weighting, ("halves", "layers", "matrices"))
    by_pair: dict[tuple[float, float], list[Tensor]] = {}
    skipped: dict[str, None] = {}
    for name, weight in kernels(model, example_inputs).items():
        means = _class_means(weight, "signed")
        rounding = math.prod(weight.shape[2:]) * sys.float_info.epsilon
        _, distances = distance_classes(weight.shape[2:])
        for i, pair in enumerate(pairwise(distances)):
            differences = means[:, i] - means[:, i + 1]
            deviation = differences.std(correction=0).item()
            if deviation > rounding:
                by_pair.setdefault(pair, []).append(differences / deviation)
            else:
                skipped.setdefault(name)
    cells: list[Cell] = []
    for pair, layers in sorted(by_pair.items()):
        lower, upper = layers[: (len(layers) + 1) // 2], layers[(len(layers) + 1) // 2 :]
        for part, counted in (("all", layers), ("lower", lower), ("upper", upper)):
            if weighting == "layers":
                samples = counted
            elif weighting == "halves" and part == "all":
                samples = [torch.cat(half) for half in (lower, upper) if half]
            else:
                samples = [torch.cat(counted)] if counted else []
            if samples:
                cells.append(_cell(part, pair, samples, len(counted)))
    return LocalityStatistics(weighting, tuple(cells), tuple(skipped))


def estimate_locality(
    models: Model | Sequence[Model], c: float = 1.5, eta_rule: str = "local", stat: str = "signed"
) -> dict[str, tuple[float, ...]]:
    """Decay factors for each layer, from trained models of one architecture (the paper's section 7.2 and Table 6).

    With ``m(I)`` the mean weight of the class ``I``, ``r(I, I')`` the ratio ``m(I) / m(I')`` over the matrices of a
    layer, averaged over the models, and ``a(r) = 1 + c * (r - 1)``: ``gamma = a(r(I_n, I_c))`` for the centre and
    ``eta = 1 / a(r(I_co, I_n))`` for the corners. Larger kernels go on outward, class by class: the factor of a class
    is that of the one before divided by ``a(r(class, class before))``.

    The paper prints ``eta = 1 / a(r(I_n, I_co))``. That is inverted: where weights decrease with distance it is below 1
    and decays corners *less*, against the paper's section 6. The default is the rule above.

    ``a`` is clamped to [1/4, 4], for it has a zero, and means near zero give wild ratios. A layer is left uniform, with
    one warning for all such layers, where in one of the models its means differ in sign, or one of them is within three
    standard errors (over the matrices) of 0, or it has a single matrix, hence no standard error. All factors are thus
    positive and finite.

    Args:
        models: one or a sequence of modules or mappings, such as state dicts; see
            :func:`loco_ext.analysis.kernels.kernels` for what counts as a convolution.
        c: how far deviations of the ratio from 1 are taken, at least 0.
        eta_rule: "local", or "paper" for the printed rule: the factor of a class is that of the one before divided by
            ``a(r(class before, class))``.
        stat: of the weights of a class in one matrix, the mean ("signed", the paper's), the mean magnitude ("abs"), or
            the root mean square ("rms").

    Returns:
        Layer names to ``(gamma, eta)`` for kernels of two or three distance classes (eta is 1 where there are two),
        else to one factor per class, nearest first, with factor 1 for the class at distance 1: the ``per_layer`` of
        :func:`loco_ext.optim.parameter_groups`.

    Raises:
        TypeError: ``models`` or ``c`` is of another type.
        ValueError: no models, models whose layers differ, an unknown ``eta_rule`` or ``stat``, a negative or infinite
            ``c``, or as :func:`loco_ext.analysis.kernels.kernels`.

    >>> weight = torch.ones(8, 8, 3, 3)
    >>> weight[..., 1, 1] = 1.25
    >>> {name: [round(g, 3) for g in factors] for name, factors in estimate_locality({"conv.weight": weight}).items()}
    {'conv': [0.7, 1.0]}
    """
    check_number("c", c)
    check_choice("eta_rule", eta_rule, ("local", "paper"))
    check_choice("stat", stat, ("signed", "abs", "rms"))
    if isinstance(models, nn.Module | Mapping):
        models = [models]
    if not isinstance(models, Sequence):
        raise TypeError(f"models: expected a model or a sequence of models, got {type(models).__name__}")
    if len(models) == 0:
        raise ValueError(f"models: expected at least one, got {models!r}")

    shapes: list[dict[str, tuple[int, ...]]] = []
    means: list[dict[str, Tensor | None]] = []
    for model in models:
        found = kernels(model)
        shapes.append({name: tuple(weight.shape) for name, weight in found.items()})
        means.append({name: _layer_means(weight, stat) for name, weight in found.items()})
    _check_same_layers(shapes)

    result: dict[str, tuple[float, ...]] = {}
    uniform: list[str] = []
    for name, shape in shapes[0].items():
        known = [row for row in (layers[name] for layers in means) if row is not None]
        if len(known) == len(models):
            factors = _factors(torch.stack(known), c, eta_rule)
        else:
            factors = [1.0] * len(distance_classes(shape[2:])[1])
            uniform.append(name)
        result[name] = _as_locality(factors)
    if uniform:
        warnings.warn(
            f"estimate_locality leaves {', '.join(map(repr, uniform))} uniform: in a model, means of weights differ in "
            "sign or are within 3 standard errors of 0",
            UserWarning,
            stacklevel=2,
        )
    return result


def _class_means(weight: Tensor, stat: str) -> Tensor:
    """``m(w, I)`` of every matrix and class, as ``[matrices, classes]``, in units of the layer's largest weight."""
    taps = weight.flatten(2).flatten(0, 1)
    largest = taps.abs().max()
    if largest > 0:
        taps = taps / largest
    if stat != "signed":
        taps = taps.abs() if stat == "abs" else taps.square()
    index, distances = distance_classes(weight.shape[2:])
    means = torch.stack([taps[:, index.flatten() == i].mean(1) for i in range(len(distances))], dim=1)
    return means.sqrt() if stat == "rms" else means


def _cell(part: str, distances: tuple[float, float], samples: list[Tensor], layers: int) -> Cell:
    """The mean of the samples' means, tested against 0."""
    mean = math.fsum(sample.mean().item() for sample in samples) / len(samples)
    squared_errors = [sample.var().item() / len(sample) for sample in samples]
    error = math.sqrt(math.fsum(squared_errors)) / len(samples)
    # Welch-Satterthwaite; of one sample, its size less 1.
    freedom = math.fsum(squared_errors) ** 2 / math.fsum(
        square**2 / (len(sample) - 1) for square, sample in zip(squared_errors, samples, strict=True)
    )
    t = mean / error
    return Cell(
        part=part,
        distances=distances,
        mean=mean,
        standard_error=error,
        p_greater=float(stdtr(freedom, -t)),
        p_two_sided=2 * float(stdtr(freedom, -abs(t))),
        matrices=sum(map(len, samples)),
        layers=layers,
    )


def _layer_means(weight: Tensor, stat: str) -> Tensor | None:
    """``m(w, I)`` averaged over a layer's matrices, per class; None unless all are surely of one sign."""
    means = _class_means(weight, stat)
    if len(means) == 1:
        return None
    layer = means.mean(0)
    sure = layer.abs() > 3 * means.std(0) / math.sqrt(len(means))
    same_sign = (layer > 0).all() or (layer < 0).all()
    return layer if sure.all() and same_sign else None


def _factors(means: Tensor, c: float, eta_rule: str) -> list[float]:
    """One factor per class, nearest first, from means of shape ``[models, classes]``."""

    def modulated(i: int, j: int) -> float:
        ratio = min((means[:, i] / means[:, j]).mean().item(), sys.float_info.max)
        return min(max(1 + c * (ratio - 1), 0.25), 4.0)

    factors = [modulated(1, 0), 1.0]
    for i in range(1, means.shape[1] - 1):
        factors.append(factors[i] / (modulated(i + 1, i) if eta_rule == "local" else modulated(i, i + 1)))
    return factors


def _as_locality(factors: list[float]) -> tuple[float, ...]:
    """Of up to three classes ``(gamma, eta)``; eta is the last factor, which is 1 where there are two."""
    return tuple(factors) if len(factors) > 3 else (factors[0], factors[-1])


def _check_same_layers(shapes: list[dict[str, tuple[int, ...]]]) -> None:
    for i, other in enumerate(shapes):
        for name in [*shapes[0], *other]:
            if shapes[0].get(name) != other.get(name):
                raise ValueError(
                    f"models: expected the same layers in all, got layer {name!r} of shape {shapes[0].get(name)} in "
                    f"models[0] and {other.get(name)} in models[{i}]"
                )
