"""The compiled library: host functions without torch. Its operators are in ``torch.ops.loco_ext``."""

import numpy as np

Tables = tuple[np.ndarray, np.ndarray, np.ndarray]
Sizes = tuple[int, int, int]

def build_info() -> dict[str, str]:
    """The compiler, and the instruction set that the kernels were chosen for on this machine."""

def release(hold: int) -> None:
    """Frees the penalty that ``torch.ops.loco_ext.ring_penalty_register`` took."""

def conv_pattern(pixels: Tables, image: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """The pairs that a convolution computes with, as ``crow`` and ``col``.

    All functions on patterns are in loco_ext/geometry/pattern_fallback.py too. ``pixels[axis][output, tap]`` is the
    pixel read along one of three axes, -1 in the padding.
    """

def conv_taps(
    pixels: Tables, image: Sizes, crow: np.ndarray, col: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Block, tap and output pixel of each tap that reads a pixel whose block is in the pattern."""

def grow(
    crow: np.ndarray, col: np.ndarray, image: Sizes, radius: int, wraps: bool, seeds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Each row's pixels, or its seed where it has none, and those at most ``radius`` away along every axis."""

def unite(
    crow: np.ndarray, col: np.ndarray, other_crow: np.ndarray, other_col: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The blocks of either pattern."""

def locate(crow: np.ndarray, col: np.ndarray, whole_crow: np.ndarray, whole_col: np.ndarray) -> np.ndarray:
    """The index of each block in the whole pattern, which has them all."""

def are_valid(crow: np.ndarray, col: np.ndarray, n_in: int) -> bool:
    """Whether these are a pattern's indices."""

def transpose(crow: np.ndarray, col: np.ndarray, n_in: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pattern by input pixel: where each one's entries begin, their output pixels, their blocks."""

def cpu_capabilities() -> list[str]:
    """Return the instruction sets that kernels are compiled for and this machine has, best first."""

def use_cpu_capability(name: str) -> None:
    """Use the kernels of one of :func:`cpu_capabilities` from now on, for tests and measurements."""
