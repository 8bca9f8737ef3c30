"""Classes of channels that stay or go together: union-find, with the reasons why some stay."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


class Atoms:
    """Classes of channels that stay or go together, and why those that stay do."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._reasons: dict[int, str] = {}
        self._fillers: set[int] = set()
        self.ordered: set[int] = set()  # read or made by something that knows nothing of other orders

    def new(self, count: int) -> Integers:
        first = len(self._parent)
        self._parent.extend(range(first, first + count))
        return np.arange(first, first + count)

    def find(self, atom: int) -> int:
        while self._parent[atom] != atom:
            self._parent[atom] = self._parent[self._parent[atom]]
            atom = self._parent[atom]
        return atom

    def unite(self, some: Iterable[int], others: Iterable[int]) -> None:
        for one, other in zip(some, others, strict=True):
            one, other = self.find(one), self.find(other)
            if one != other:
                self._parent[other] = one
                if other in self._reasons:
                    self._reasons.setdefault(one, self._reasons.pop(other))

    def need(self, atoms: Iterable[int], reason: str) -> bool:
        """Marks the atoms as needed; whether one of them was not before."""
        fresh = {root for atom in atoms if (root := self.find(atom)) not in self._reasons}
        self._reasons.update(dict.fromkeys(fresh, reason))
        return bool(fresh)

    def needed(self, atoms: Integers) -> NDArray[np.bool_]:
        return np.array([self.find(atom) in self._reasons for atom in atoms], dtype=bool)

    def fill(self, atoms: Iterable[int]) -> None:
        """Keeps atoms that nothing needs."""
        self._fillers.update(self.find(atom) for atom in atoms)

    def kept(self, atoms: Integers) -> NDArray[np.bool_]:
        """Which are needed, or fill up a number of channels."""
        return self.needed(atoms) | np.array([self.find(atom) in self._fillers for atom in atoms], dtype=bool)

    def reason(self, atom: int) -> str:
        return self._reasons[self.find(atom)]

    def alone(self, atoms: Integers) -> bool:
        """Whether each of the atoms is the only one of its class."""
        sizes = np.bincount([self.find(atom) for atom in range(len(self._parent))], minlength=len(self._parent))
        return all(sizes[self.find(atom)] == 1 for atom in atoms)
