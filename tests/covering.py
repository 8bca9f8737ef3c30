"""Selections of a product of parameters that still let every few values meet."""

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def covering(*axes: Iterable[Any], strength: int = 2, sweep: bool = False) -> list[Any]:
    """Return the combinations of one value of each axis in which all values of every ``strength`` axes meet.

    A fault that takes fewer values to show, such as one of a dtype in a layout, is seen by some combination. The
    ordinary tests are the first of them in which every value occurs; the others are slow tests. With ``sweep``, all
    other combinations follow as slow tests, too.
    """
    values = [list(axis) for axis in axes]
    sizes = [len(axis) for axis in values]
    ordinary, chosen = _selection(sizes, 1), _selection(sizes, strength)

    def parameter(numbers: tuple[int, ...]) -> Any:
        marks = [] if numbers in ordinary else [pytest.mark.slow]
        return pytest.param(*(axis[number] for axis, number in zip(values, numbers, strict=True)), marks=marks)

    everything = itertools.product(*map(range, sizes))
    return [parameter(numbers) for numbers in everything if sweep or numbers in ordinary | chosen]


def _selection(sizes: Sequence[int], strength: int) -> set[tuple[int, ...]]:
    """Return numbers of values, one of each axis, such that all of every ``strength`` axes meet."""
    everything = list(itertools.product(*map(range, sizes)))
    shuffled = random.Random(0).sample(everything, len(everything))
    places = list(itertools.combinations(range(len(sizes)), min(strength, len(sizes))))
    met: set[Any] = set()
    chosen: set[tuple[int, ...]] = set()
    for least in range(len(places), 0, -1):  # first those combinations that let most values meet
        for numbers in shuffled:
            meets = {(place, tuple(numbers[axis] for axis in place)) for place in places} - met
            if len(meets) >= least:
                chosen.add(numbers)
                met |= meets
    return chosen


def slow(value: Any) -> Any:
    """Return a parameter, or the tuple of several, of the slow tests."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)


def label(value: Any) -> str:
    """Return the id of a parameter; a dictionary's is made of its values."""
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)
