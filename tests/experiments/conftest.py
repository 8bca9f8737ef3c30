"""Fixtures for the tests of experiments."""

import pytest

from tests.drawing import undrawn  # noqa: F401


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Use one thread for networks this small, too."""
