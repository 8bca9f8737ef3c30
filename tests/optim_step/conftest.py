"""Fixtures for the tests of the optimizer step."""

from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.optim_step.interpreter import Interpreter


@pytest.fixture
def interpreter(interpreter_process: ProcessPoolExecutor) -> Interpreter:
    """Return Triton's interpreter, which steps cases by the Triton kernels."""
    return Interpreter(interpreter_process)
