"""The setting that keeps freed memory for the next step."""

import resource
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from loco_ext.experiments.malloc import keep_freed_memory
from tests.processes import SERVER


def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def step():
    tensors = [torch.ones(size) for size in (5_000_000, 5_000_000, 5_000_000, 20_000_000)]
    tensors.pop(1)


def faults(keep):
    """Return whether freed memory is kept, and the number of page faults of 20 steps."""
    kept = keep and keep_freed_memory()
    for _ in range(3):  # memory grows until it holds what a step needs, wherever that comes to lie
        step()
    before = page_faults()
    for _ in range(20):
        step()
    return kept, page_faults() - before


@pytest.mark.slow
def test_freed_memory_serves_the_next_step():
    found = []
    for keep in (True, False):
        with ProcessPoolExecutor(1, SERVER) as pool:
            found.append(pool.submit(faults, keep).result())
    (kept, count), (_, without) = found
    if not kept or not without:
        pytest.skip("this system's malloc takes no options, or the system counts no page faults")
    assert count < without / 5
