"""Fixtures for the tests of the optimizers."""

import pytest
import torch

import loco_ext
from loco_ext.ops import backends


@pytest.fixture(params=["native", "triton"])
def backend(request):
    """Force our CUDA or our Triton kernels."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    if reason := backends.missing("optim_step", request.param, "cuda"):
        pytest.skip(reason)
    with loco_ext.backend(request.param):
        yield request.param
