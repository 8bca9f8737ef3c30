"""Fixtures for the tests of the optimizers."""

import pytest

from tests.gpu import using


@pytest.fixture(params=["native", "triton"])
def backend(request):
    """Force our CUDA or our Triton kernels."""
    yield from using("optim_step", request.param)
