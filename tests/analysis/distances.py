"""Distance classes and their means by plain loops."""

import itertools
import math

import numpy as np

STATISTICS = {
    "signed": lambda values: sum(values) / len(values),
    "abs": lambda values: sum(map(abs, values)) / len(values),
    "rms": lambda values: math.sqrt(sum(value**2 for value in values) / len(values)),
}


def classes_of(shape):
    """Return a dict from squared distance to the taps at that distance from the centre, nearest first."""
    taps = sorted(itertools.product(*map(range, shape)))
    squares = {tap: sum((i - n // 2) ** 2 for i, n in zip(tap, shape, strict=True)) for tap in taps}
    return {square: [tap for tap in taps if squares[tap] == square] for square in sorted(set(squares.values()))}


def class_means(weight, stat="signed"):
    """Return the statistic of each class of each matrix, ``[matrices, classes]``."""
    weight = np.asarray(weight.double())
    matrices = weight.reshape(-1, *weight.shape[2:])
    classes, of = classes_of(weight.shape[2:]).values(), STATISTICS[stat]
    return np.array([[of([matrix[tap] for tap in taps]) for taps in classes] for matrix in matrices])
