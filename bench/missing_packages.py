"""Plugin of pytest that skips test modules that need a package that is not installed, and names it.

python -m pytest -p bench.missing_packages
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

OURS = ("bench", "loco_ext", "studies", "tests")


class Missing(pytest.Item):
    """The one test of a module that cannot be imported."""

    def runtest(self) -> None:
        pytest.skip(f"needs {self.name}")


class Module(pytest.Module):
    """A test module, which has one skipped test where a package is missing."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Collect the module's tests."""
        try:
            return super().collect()
        except self.CollectError as error:
            cause = error.__cause__
            package = (cause.name or "").partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
            if not package or package in OURS:
                raise
            return [Missing.from_parent(self, name=package)]


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Return the collector of a test module."""
    return Module.from_parent(parent, path=module_path)
