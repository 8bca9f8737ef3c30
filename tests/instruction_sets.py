"""The backends of operators whose CPU kernels are compiled once for each instruction set."""

from collections.abc import Iterator

import loco_ext
from loco_ext.ops import backends

SETS = tuple(backends.library.cpu_capabilities() if backends.library else ())  # that this machine has, best first
BACKENDS = ("reference", *(f"native, {name}" for name in SETS))


def using(name: str) -> Iterator[str]:
    """Use one of BACKENDS until a fixture ends; yield its name."""
    backend, _, instructions = name.partition(", ")
    with loco_ext.backend(backend):
        if instructions:
            backends.library.use_cpu_capability(instructions)
        yield name
        if instructions:
            backends.library.use_cpu_capability(SETS[0])
