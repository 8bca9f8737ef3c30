"""The compiled library: host functions. Its operators are in ``torch.ops.loco_ext``."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

class SameTensors:
    """Where parameters and the tensors in their states lie: memory, sizes, strides, dtypes and devices.

    Args:
        params: a list of tensors.
        state: an optimizer's dict of a dict of states for each parameter.
        owners: a list of the keys of ``state``.
        places: for each parameter, the place of its states in ``state``, or empty if there are none.
        names: a tuple of the keys of the states.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        state: Mapping[Tensor, Mapping[str, Any]],
        owners: Sequence[Tensor],
        places: Sequence[int],
        names: tuple[str, ...],
    ) -> None: ...
    def gradients(
        self,
        params: Sequence[Tensor],
        state: Mapping[Tensor, Mapping[str, Any]],
        owners: Sequence[Tensor],
        names: tuple[str, ...],
    ) -> list[Tensor] | None:
        """Return the parameters' gradients, or None unless all have one and all tensors lie where those did.

        None also if ``state`` has other keys than ``owners``, or in another order.
        """

def build_info() -> dict[str, str]:
    """The compiler, and the instruction set that the kernels were chosen for on this machine."""

def cpu_capabilities() -> list[str]:
    """Return the instruction sets that kernels are compiled for and this machine has, best first."""

def use_cpu_capability(name: str) -> None:
    """Use the kernels of one of :func:`cpu_capabilities` from now on, for tests and measurements."""
