"""Former names, which keep working in this version."""

import warnings
from typing import Any

PRESENT_NAMES = {
    "multiply_adds": "macs",
    "multiply_adds_before": "macs_before",
    "multiply_adds_after": "macs_after",
    "multiply_adds_executed": "macs_executed",
    "kernels_before": "filters_before",
    "kernels_after": "filters_after",
    "identity_kernels": "identity_filters",
    "kernel_strengths": "filter_strengths",
    "zero_dead_kernels": "zero_dead_filters",
}


class FormerNames:
    """Base class of objects whose attributes can be read by their former names with a warning."""

    def __getattr__(self, name: str) -> Any:
        if name not in PRESENT_NAMES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self, present_name(name))


def present_name(name: str) -> str:
    """Return the present name for a present or former one; for a former one, warn the caller's caller."""
    present = PRESENT_NAMES.get(name, name)
    if present != name:
        text = f"{name}: this is called {present}; the former name will go"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
    return present
