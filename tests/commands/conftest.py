"""Fixtures for the tests of commands."""

import pytest

from tests.drawing import drawn, undrawn  # noqa: F401


@pytest.fixture(autouse=True)
def _undrawn(undrawn):  # noqa: F811
    """Leave figures empty; tests that look at them ask for ``drawn``."""
