"""Fixtures for all tests."""

from collections.abc import Iterator

import pytest
import torch

import loco_ext


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from one seed and leaves torch's global settings as they were."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


@pytest.fixture
def native() -> Iterator[None]:
    """Forces the compiled kernels, so that a missing library fails tests instead of running the reference."""
    with loco_ext.backend("native"):
        yield
