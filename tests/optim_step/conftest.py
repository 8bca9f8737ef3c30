"""Fixtures for the tests of the optimizer step."""

import zlib
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.optim_step.interpreter import Interpreter


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave a third of the cases that the slow interpreter shares with the other kernels to the ordinary tests."""
    for item in items:
        of_interpreter = getattr(item, "callspec", None) and item.callspec.params.get("kernels") == "interpreter"
        if of_interpreter and item.path.name != "test_triton.py" and zlib.crc32(item.nodeid.encode()) % 3:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def interpreter(interpreter_process: ProcessPoolExecutor) -> Interpreter:
    """Return Triton's interpreter, which steps cases by the Triton kernels."""
    return Interpreter(interpreter_process)
