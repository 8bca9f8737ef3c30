"""Channels that are kept or removed together: a disjoint-set (union-find) structure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


class DisjointSet:
    """Classes of channels that are kept or removed together, with the reasons why some are kept."""

    def __init__(self) -> None:
        self._parent: Integers = np.empty(0, np.int64)
        self._needed = self._filled = np.empty(0, bool)  # valid at roots
        self._reasons: dict[int, str] = {}
        self.ordered: set[int] = set()  # channels read or produced by an operation that depends on their order

    def new(self, count: int) -> Integers:
        fresh = np.arange(len(self._parent), len(self._parent) + count)
        self._parent = np.concatenate([self._parent, fresh])
        self._needed = np.concatenate([self._needed, np.zeros(count, bool)])
        self._filled = np.concatenate([self._filled, np.zeros(count, bool)])
        return fresh

    def roots(self, ids: Sequence[int] | Integers) -> Integers:
        """Return the representative of each channel's class."""
        some = np.asarray(ids, np.int64)
        found = self._parent[some]
        while not np.array_equal(found, above := self._parent[found]):
            found = above
        self._parent[some] = found
        return found

    def unite(self, some: Sequence[int] | Integers, others: Sequence[int] | Integers) -> None:
        touched = np.unique(np.concatenate([self.roots(some), self.roots(others)]))
        while not np.array_equal(one := self.roots(some), other := self.roots(others)):
            np.minimum.at(self._parent, np.maximum(one, other), np.minimum(one, other))
        np.logical_or.at(self._needed, self.roots(touched), self._needed[touched])

    def need(self, ids: Sequence[int] | Integers, reason: str) -> bool:
        """Mark the channels as needed and return whether any of them was not before."""
        roots = self.roots(ids)
        fresh = roots[~self._needed[roots]]
        self._needed[fresh] = True
        self._reasons.update(dict.fromkeys(fresh.tolist(), reason))
        return bool(len(fresh))

    def needed(self, ids: Integers) -> NDArray[np.bool_]:
        return self._needed[self.roots(ids)]

    def fill(self, ids: Sequence[int] | Integers) -> None:
        """Keep channels that nothing needs."""
        self._filled[self.roots(ids)] = True

    def kept(self, ids: Integers) -> NDArray[np.bool_]:
        """Return which channels are needed, or kept all the same."""
        roots = self.roots(ids)
        return self._needed[roots] | self._filled[roots]

    def reason(self, one: int) -> str:
        """Return why the channel's class is needed."""
        told = np.fromiter(self._reasons, np.int64)
        return self._reasons[int(told[self.roots(told) == self.roots([one])][0])]

    def alone(self, ids: Integers) -> bool:
        """Return whether each of the channels is the only one of its class."""
        sizes = np.bincount(self.roots(np.arange(len(self._parent))), minlength=len(self._parent))
        return bool((sizes[self.roots(ids)] == 1).all())
