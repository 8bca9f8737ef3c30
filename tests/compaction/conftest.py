"""Fixtures that take the place of the clock, so that compaction by measured cost makes the choice under test."""

import sys
from collections.abc import Callable

import pytest

from loco_ext.sparsity.compaction import cost
from loco_ext.sparsity.compaction.rewrite import Choose
from tests.compaction.cases import mixed

compact = sys.modules["loco_ext.sparsity.compaction.compact"]


@pytest.fixture
def later_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time each further network as faster than the one before."""
    monkeypatch.setattr(cost, "latencies", lambda networks, *_: [1.0 / (1 + i) for i in range(len(networks))])


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch, later_is_faster: None) -> Callable[[Choose], None]:
    """Return a function that sets how the layers of measured networks are computed."""
    return lambda choose: monkeypatch.setitem(compact.COSTS, "measured", choose)


@pytest.fixture
def always_mixed(choosing: Callable[[Choose], None]) -> None:
    """Compute every layer with mixed_conv2d if that is possible."""
    choosing(mixed)
