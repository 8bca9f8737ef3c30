"""Former names of counts of MACs, which keep working in this version."""

import warnings
from typing import Any

FORMER, NAME = "multiply_adds", "macs"


class FormerNames:
    """Base class of reports whose attributes ``macs...`` can be read as ``multiply_adds...`` with a warning."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(FORMER):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self, present_name(name))


def present_name(name: str) -> str:
    """Return the name with ``macs`` in place of ``multiply_adds``; warn the caller's caller of a former name."""
    present = name.replace(FORMER, NAME)
    if present != name:
        text = f"{name}: this is called {present}; the former name will go"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
    return present
