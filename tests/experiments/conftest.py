"""Fixtures for the tests of experiments."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Use one thread: networks this small gain nothing from more."""
    torch.set_num_threads(1)
