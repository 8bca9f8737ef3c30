"""The compiled library: host functions without torch. Its operators are in ``torch.ops.loco_ext``."""

def build_info() -> dict[str, str]:
    """The compiler, and the instruction set that the kernels were chosen for on this machine."""

def cpu_capabilities() -> list[str]:
    """Return the instruction sets that kernels are compiled for and this machine has, best first."""

def use_cpu_capability(name: str) -> None:
    """Use the kernels of one of :func:`cpu_capabilities` from now on, for tests and measurements."""
