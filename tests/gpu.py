"""Set-up of the tests that run on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import loco_ext
from loco_ext.ops import backends

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def using(family: str, backend: str) -> Iterator[str]:
    """Force our CUDA or our Triton kernels until a fixture ends; yield the backend's name."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    if reason := backends.missing(family, backend, "cuda"):
        pytest.skip(reason)
    with loco_ext.backend(backend):
        yield backend


@contextmanager
def no_syncs() -> Iterator[None]:
    """Make every torch call that would synchronize with the GPU an error inside the context."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
