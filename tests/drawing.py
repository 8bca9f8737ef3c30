"""Figures that are left empty: drawing one takes longer than most of the tiny experiments that tests run."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

DRAW = Figure.savefig


def leave_empty(figure: Figure, path: Path, **options: Any) -> None:
    path.touch()


def without_drawing() -> None:
    """Leave all figures of this process empty."""
    Figure.savefig = leave_empty


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave figures empty."""
    monkeypatch.setattr(Figure, "savefig", leave_empty)


@pytest.fixture
def drawn(undrawn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw figures, though others of the folder's tests leave them empty."""
    monkeypatch.setattr(Figure, "savefig", DRAW)
