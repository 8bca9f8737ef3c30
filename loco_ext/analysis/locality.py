"""Statistics of locality in trained weights, and the locality-promoting decay that they suggest.

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

from loco_ext.analysis.conv_weights import Inputs, Model, conv_weights
from loco_ext.argument_checks import check_choice, check_number
from loco_ext.geometry import distance_classes


@dataclass(frozen=True)
class Cell:
    """One cell of the paper's Table 4: by how much weights at one distance exceed those at the next.

    Attributes:
        kernel_size: kernel size of the layers that count; a row of the table has cells of one size.
        part: layers of this size that count: "all", "lower" or "upper".
        distances: distances of the two classes from the centre, the nearer one first.
        mean: mean difference, in standard deviations of its layer.
        standard_error: standard error of ``mean``.
        p_greater: p-value of the one-sided t-test that the mean is above 0.
        p_two_sided: p-value of the t-test that it is not 0.
        matrices: number of matrices compared.
        layers: number of layers they come from.

    >>> Cell((3, 3), "all", (0.0, 1.0), 0.5, 0.1, 1e-4, 2e-4, matrices=100, layers=2).mean
    0.5
    """

    kernel_size: tuple[int, ...]
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
    """Result of :func:`locality_statistics`; ``dataclasses.asdict`` turns it into plain data for JSON.

    Attributes:
        weighting: the argument ``weighting``.
        cells: sorted by kernel size (fewer dimensions first, then smaller sizes), by distances, then "all", "lower",
            "upper".
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
    """Test whether weights decrease with distance from the centre (the paper's section 7.1, eq. 7.1 and Table 4).

    For each matrix and each pair of consecutive distance classes, the difference ``s`` is the mean signed weight of the
    nearer class minus that of the farther one; it is divided by the population standard deviation of ``s`` in its layer
    and averaged. Only layers of the same kernel size are compared: a 7x7 stem is not compared with 3x3 layers, nor 1x7
    with 7x1. Each size has its own cells for each pair: two pairs for 3x3, five for 5x5. There is one cell for all
    layers of the size, one for the lower and one for the upper half of them in forward order. If their number is odd,
    the middle layer is in the lower half, so a single layer has no cell for the upper half. Kernels with an even size
    have no centre and do not count.

    A layer whose ``s`` does not vary by more than rounding, such as one of a single matrix, cannot be standardised. It
    is left out before halving and listed in ``skipped``.

    Args:
        model: a module or a mapping of names to tensors, such as a state dict; see
            :func:`loco_ext.analysis.conv_weights.conv_weights` for what counts as a convolution.
        weighting: "matrices" averages over all matrices, as eq. 7.1 does. "layers" takes the mean of the layers' means.
            "halves" averages over all matrices of a half, and takes the mean of the two halves for "all", as every row
            of Table 4 does.
        example_inputs: with None, the order of registration counts as the forward order. With a tensor or a tuple of
            tensors, one forward pass finds the order.

    Returns:
        Cells with the mean, its standard error, and p-values. An average over matrices is tested by the one-sample
        t-test; a mean of means combines standard errors, with Welch-Satterthwaite degrees of freedom.

    Raises:
        TypeError, ValueError: as :func:`loco_ext.analysis.conv_weights.conv_weights`; ``weighting`` is unknown.

    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    >>> with torch.no_grad():
    ...     for layer in (model[0], model[2]):
    ...         layer.weight[..., 1, 1] += 1
    >>> statistics = locality_statistics(model)
    >>> [(cell.part, cell.p_greater < 0.001) for cell in statistics.cells if cell.distances == (0, 1)]
    [('all', True), ('lower', True), ('upper', True)]
    """
    check_choice("weighting", weighting, ("halves", "layers", "matrices"))
    by_row: dict[tuple[tuple[int, ...], tuple[float, float]], list[Tensor]] = {}
    skipped: dict[str, None] = {}
    for name, weight in conv_weights(model, example_inputs).items():
        means = _class_means(weight, "signed")
        kernel_size = tuple(weight.shape[2:])
        rounding = math.prod(kernel_size) * sys.float_info.epsilon
        _, distances = distance_classes(kernel_size)
        for i, pair in enumerate(pairwise(distances)):
            differences = means[:, i] - means[:, i + 1]
            deviation = differences.std(correction=0).item()
            if deviation > rounding:
                by_row.setdefault((kernel_size, pair), []).append(differences / deviation)
            else:
                skipped.setdefault(name)
    cells: list[Cell] = []
    for (kernel_size, pair), layers in sorted(by_row.items(), key=lambda row: (len(row[0][0]), *row[0])):
        lower, upper = layers[: (len(layers) + 1) // 2], layers[(len(layers) + 1) // 2 :]
        for part, counted in (("all", layers), ("lower", lower), ("upper", upper)):
            if weighting == "layers":
                samples = counted
            elif weighting == "halves" and part == "all":
                samples = [torch.cat(half) for half in (lower, upper) if half]
            else:
                samples = [torch.cat(counted)] if counted else []
            if samples:
                cells.append(_cell(kernel_size, part, pair, samples, len(counted)))
    return LocalityStatistics(weighting, tuple(cells), tuple(skipped))


def estimate_locality(
    models: Model | Sequence[Model], c: float = 1.5, eta_rule: str = "local", stat: str = "signed"
) -> dict[str, tuple[float, ...]]:
    """Return decay factors of each layer from trained models of one architecture (the paper's section 7.2 and Table 6).

    Let ``m(I)`` be the mean weight of class ``I``, ``r(I, I')`` the ratio ``m(I) / m(I')`` over the matrices of a
    layer, averaged over the models, and ``a(r) = 1 + c * (r - 1)``. Then ``gamma = a(r(I_n, I_c))`` for the centre and
    ``eta = 1 / a(r(I_co, I_n))`` for the corners. Larger kernels continue outward, class by class: the factor of a
    class is that of the previous class divided by ``a(r(class, previous class))``.

    The paper prints ``eta = 1 / a(r(I_n, I_co))``. That is inverted: if weights decrease with distance, it is below 1
    and decays corners *less*, contrary to the paper's section 6. The default is the rule above.

    Signed means can be near 0 or differ in sign. Ratios are then meaningless. A layer is left uniform, ``(1, 1)`` or
    all ones, unless its means have one sign in all classes and each is more than three standard errors from 0. One
    warning names all such layers. The test is *pooled*: over the matrices of all models together, unscaled, with the
    standard error ``s / sqrt(n)`` for the sample standard deviation ``s`` of these ``n`` numbers. With more models of
    one kind, fewer layers are thus left uniform. A depthwise layer has one matrix per channel. A layer of a single
    matrix has no standard error within one model and needs at least two models.

    If every model passes that test by itself as well, ratios are averaged over the models, as in the paper. If only the
    pooled means pass, a single model's ratio may have a denominator of about 0, so the ratio is that of the pooled
    means. ``a`` is clamped to [1/4, 4] because it has a zero. All factors are thus positive and finite.

    Args:
        models: one module or mapping, such as a state dict, or a sequence of them; see
            :func:`loco_ext.analysis.conv_weights.conv_weights` for what counts as a convolution.
        c: scale of the ratio's deviation from 1, at least 0.
        eta_rule: "local", or "paper" for the printed rule, in which the factor of a class is that of the previous class
            divided by ``a(r(previous class, class))``.
        stat: statistic of the weights of a class in one matrix: the mean ("signed", as in the paper), the mean
            magnitude ("abs"), or the root mean square ("rms").

    Returns:
        By layer name, ``(gamma, eta)`` for kernels of two or three distance classes (eta is 1 for two), else one factor
        per class, nearest first, with factor 1 for the class at distance 1. This is the ``per_layer`` of
        :func:`loco_ext.optim.parameter_groups`.

    Raises:
        TypeError: ``models`` or ``c`` has another type.
        ValueError: there are no models, their layers differ, ``eta_rule`` or ``stat`` is unknown, ``c`` is negative or
            infinite, or as :func:`loco_ext.analysis.conv_weights.conv_weights`.

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
    by_model: list[dict[str, _ClassMeans]] = []
    for model in models:
        found = conv_weights(model)
        shapes.append({name: tuple(weight.shape) for name, weight in found.items()})
        by_model.append({name: _ClassMeans.of(weight, stat) for name, weight in found.items()})
    _check_same_layers(shapes)

    result: dict[str, tuple[float, ...]] = {}
    uniform: list[str] = []
    for name in shapes[0]:
        of_models = [layers[name] for layers in by_model]
        pooled = _ClassMeans.pool(of_models)
        if pooled.are_sure():
            averaged = of_models if all(means.are_sure() for means in of_models) else [pooled]
            factors = _factors(torch.stack([means.mean for means in averaged]), c, eta_rule)
        else:
            factors = [1.0] * len(pooled.mean)
            uniform.append(name)
        result[name] = _as_locality(factors)
    if uniform:
        warnings.warn(
            f"estimate_locality leaves {', '.join(map(repr, uniform))} uniform: over all models, means of weights "
            "differ in sign or are within 3 standard errors of 0",
            UserWarning,
            stacklevel=2,
        )
    return result


def _class_means(weight: Tensor, stat: str) -> Tensor:
    """Return ``m(w, I)`` of every matrix and class, [matrices, classes], in units of the layer's largest weight."""
    taps = weight.flatten(2).flatten(0, 1)
    largest = taps.abs().max()
    if largest > 0:
        taps = taps / largest
    index, distances = distance_classes(weight.shape[2:])
    classes = [taps[:, index.flatten() == i] for i in range(len(distances))]  # [matrices, taps of the class] each
    if stat == "rms":
        return torch.stack([_norm(of_class.T) / math.sqrt(of_class.shape[1]) for of_class in classes], dim=1)
    return torch.stack([(of_class.abs() if stat == "abs" else of_class).mean(1) for of_class in classes], dim=1)


def _cell(
    kernel_size: tuple[int, ...], part: str, distances: tuple[float, float], samples: list[Tensor], layers: int
) -> Cell:
    """Return the cell of the mean of the samples' means, tested against 0."""
    mean = math.fsum(sample.mean().item() for sample in samples) / len(samples)
    squared_errors = [sample.var().item() / len(sample) for sample in samples]
    error = math.sqrt(math.fsum(squared_errors)) / len(samples)
    # Welch-Satterthwaite degrees of freedom; one sample gives its size minus 1.
    freedom = math.fsum(squared_errors) ** 2 / math.fsum(
        square**2 / (len(sample) - 1) for square, sample in zip(squared_errors, samples, strict=True)
    )
    t = mean / error
    return Cell(
        kernel_size=kernel_size,
        part=part,
        distances=distances,
        mean=mean,
        standard_error=error,
        p_greater=float(stdtr(freedom, -t)),
        p_two_sided=2 * float(stdtr(freedom, -abs(t))),
        matrices=sum(map(len, samples)),
        layers=layers,
    )


@dataclass(frozen=True)
class _ClassMeans:
    """Moments of ``m(w, I)`` over the matrices of a layer, by class.

    Attributes:
        mean: mean by class, [classes], in units of ``unit``.
        deviation: root of the summed squared deviations from ``mean``, [classes], in units of ``unit``.
        matrices: number of matrices.
        unit: magnitude of the layer's largest weight.
    """

    mean: Tensor
    deviation: Tensor
    matrices: int
    unit: float

    @classmethod
    def of(cls, weight: Tensor, stat: str) -> "_ClassMeans":
        """Return the moments of one layer of one model."""
        means = _class_means(weight, stat)
        mean = means.mean(0)
        return cls(mean, _norm(means - mean), len(means), weight.abs().max().item())

    @classmethod
    def pool(cls, models: Sequence["_ClassMeans"]) -> "_ClassMeans":
        """Return the moments over the matrices of one layer in all models, as if they belonged to one model."""
        unit = max(model.unit for model in models)
        scales = [model.unit / unit if unit > 0 else 1.0 for model in models]
        matrices = models[0].matrices
        of_models = torch.stack([model.mean * scale for model, scale in zip(models, scales, strict=True)])
        within = torch.stack([model.deviation * scale for model, scale in zip(models, scales, strict=True)])
        mean = of_models.mean(0)
        between = math.sqrt(matrices) * (of_models - mean)
        return cls(mean, _norm(torch.cat([within, between])), len(models) * matrices, unit)

    def are_sure(self) -> bool:
        """Return whether the means of all classes have one sign and are each more than 3 standard errors from 0."""
        if self.matrices == 1:
            return False
        standard_error = self.deviation / math.sqrt((self.matrices - 1) * self.matrices)
        clear = (self.mean.abs() > 3 * standard_error).all()
        return bool(clear and ((self.mean > 0).all() or (self.mean < 0).all()))


def _norm(values: Tensor) -> Tensor:
    """Return the Euclidean norm along the first dimension; its squares neither overflow nor underflow."""
    largest = values.abs().amax(0)
    return (values / largest.where(largest > 0, 1)).square().sum(0).sqrt() * largest


def _factors(means: Tensor, c: float, eta_rule: str) -> list[float]:
    """Return one factor per class, nearest first, from means of shape [models, classes]."""

    def modulated(i: int, j: int) -> float:
        ratio = min((means[:, i] / means[:, j]).mean().item(), sys.float_info.max)
        return min(max(1 + c * (ratio - 1), 0.25), 4.0)

    factors = [modulated(1, 0), 1.0]
    for i in range(1, means.shape[1] - 1):
        factors.append(factors[i] / (modulated(i + 1, i) if eta_rule == "local" else modulated(i, i + 1)))
    return factors


def _as_locality(factors: list[float]) -> tuple[float, ...]:
    """Return ``(gamma, eta)`` for up to three classes, else all factors; eta is the last factor, 1 for two classes."""
    return tuple(factors) if len(factors) > 3 else (factors[0], factors[-1])


def _check_same_layers(shapes: list[dict[str, tuple[int, ...]]]) -> None:
    for i, other in enumerate(shapes):
        for name in [*shapes[0], *other]:
            if shapes[0].get(name) != other.get(name):
                raise ValueError(
                    f"models: expected the same layers in all, got layer {name!r} of shape {shapes[0].get(name)} in "
                    f"models[0] and {other.get(name)} in models[{i}]"
                )
