"""The setting that keeps freed memory for the next step."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from loco_ext.experiments.malloc import keep_freed_memory

kept = "keep" in sys.argv and keep_freed_memory()

def step():
    tensors = [torch.ones(size) for size in (5_000_000, 5_000_000, 5_000_000, 20_000_000)]
    tensors.pop(1)

for _ in range(3):  # memory grows until it holds what a step needs, wherever that comes to lie
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*arguments):
    command = [sys.executable, "-c", FAULTS, *arguments]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    kept, count = text.split()
    return kept == "True", int(count)


@pytest.mark.slow
def test_freed_memory_serves_the_next_step():
    kept, count = faults("keep")
    if not kept:
        pytest.skip("this system's malloc takes no options")
    _, without = faults()
    if not without:
        pytest.skip("this system counts no page faults")
    assert count < without / 5
