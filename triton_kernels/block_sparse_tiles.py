"""Tile sizes of block-sparse multiplication in Triton, chosen by sizes, dtype and the GPU's shared memory.

Two aims decide: a block of values is read from memory once, so a program takes as many samples as it can, up to 256;
two programs fit on a multiprocessor, so that one loads while the other stores.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from loco_ext.triton_kernels.block_sparse_kernels import Form

LEAST = 16  # smallest size of a tile of tl.dot along each axis
UNIT = 16  # largest unit, in elements
Units = tuple[int, int]  # the units of x and of y
BLOCKS_OF_A_PROGRAM = 16  # approximate number of blocks whose gradients one program computes
DEPTHWISE_ELEMENTS, DEPTHWISE_CHANNELS = 2048, 64  # most elements and channels of a depthwise tile

_cached = lru_cache(maxsize=256)  # choosing a plan takes the host as long as all else of a call


@dataclass(frozen=True)
class Most:
    """The largest tiles for a kind of arithmetic."""

    samples: int
    summed: int  # channels that are summed over, or samples if the batch does not fit
    channels: int  # channels of the product
    few_samples: int  # samples if the tile has more than 64 channels
    block: int  # channels on either side of a block's gradient
    accumulated: int  # largest result, in elements, for 4 warps; larger ones take 8


MOST = {
    "half": Most(256, 64, 128, 128, 128, 128 * 64),
    "tf32": Most(256, 32, 128, 128, 64, 128 * 64),
    "ieee": Most(128, 16, 64, 128, 64, 64 * 64),  # no tensor cores: operands are in each thread's registers
    "double": Most(64, 16, 64, 64, 64, 32 * 32),
}


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that a plan depends on."""

    shared_memory: int  # bytes that a program may use
    fences: bool = True  # whether tensor cores wait for tiles that are copied asynchronously; see puts_fences


def puts_fences(version: str, capability: tuple[int, int]) -> bool:
    """Return whether this version of Triton makes the tensor cores of an NVIDIA GPU wait for asynchronous copies.

    Those of capabilities 9 to 11 read shared memory by themselves (wgmma, tcgen05). Before 3.7.1, Triton left out the
    fence between the copies and them in loops whose number of iterations it does not know, so results may be wrong.
    """
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    return release >= (3, 7, 1) or not 9 <= capability[0] < 12


@dataclass(frozen=True)
class Plan:
    """A kernel's compile-time constants and launch options."""

    form: Form
    warps: int
    stages: int

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of the launch."""
        return {"FORM": self.form, "num_warps": self.warps, "num_stages": self.stages}


def kind_of(dtype: torch.dtype, tf32: bool) -> str:
    """Return the kind of arithmetic, a key of ``MOST``."""
    if dtype == torch.float64:
        return "double"
    return "half" if dtype.itemsize == 2 else "tf32" if tf32 else "ieee"


def unit_of(*sizes: int) -> int:
    """Return the largest power of 2 up to UNIT that divides all sizes."""
    return math.gcd(UNIT, *sizes)


def _power(size: int, most: int) -> int:
    """Return the smallest power of 2 that is at least ``size``, limited to between LEAST and ``most``."""
    return min(max(triton.next_power_of_2(size), LEAST), most)


def _common(kind: str, units: Units) -> dict[str, Any]:
    return {
        "x_unit": units[0],
        "y_unit": units[1],
        "sums": tl.float64 if kind == "double" else tl.float32,
        "precision": "tf32" if kind == "tf32" else "ieee",
    }


def _most_by_hand(depth: int, unit: int, dtype: torch.dtype) -> int:
    """Return the most samples that can be loaded at a time: fewer if elements are too small for async copies.

    Copies that bypass the registers need at least 4 bytes.
    """
    return 2048 // depth if unit * dtype.itemsize < 4 else 256


def _stages(stages: int, kind: str, gpu: Gpu) -> int:
    """Return 1, which copies no tile asynchronously, where tensor cores would not wait for the copies."""
    return stages if gpu.fences or kind not in ("half", "tf32") else 1


@_cached
def product(
    batch: int, summed: int, channels: int, dtype: torch.dtype, tf32: bool, gpu: Gpu, units: Units, transposed: bool
) -> Plan:
    """Return the plan for products of samples by blocks ``[summed, channels]``."""
    kind, shared = kind_of(dtype, tf32), gpu.shared_memory
    most = MOST[kind]
    width, depth = _power(channels, most.channels), _power(summed, most.summed)
    by_hand = _most_by_hand(depth, units[0], dtype)
    samples = _power(batch, min(by_hand, most.few_samples if width > 64 else most.samples))
    while 2 * _stage(samples, depth, width, dtype) > shared:
        samples //= 2
    # One stage computes, two or one load the next tiles, and as many load the pixels that tiles further ahead need.
    stages = 5 if 3 * _stage(samples, depth, width, dtype) <= shared // 4 and by_hand == 256 else 3
    parts = triton.cdiv(summed, depth)
    warps = 8 if samples * width > most.accumulated else 4
    form = Form(samples, depth, width, parts=parts, transposed=transposed, **_common(kind, units))
    return Plan(form, warps, _stages(stages, kind, gpu))


def _stage(samples: int, depth: int, width: int, dtype: torch.dtype) -> int:
    """Return the bytes of the two tiles that are loaded at a time."""
    return (samples + width) * depth * dtype.itemsize


@_cached
def gradient(
    batch: int, depth: int, width: int, dtype: torch.dtype, tf32: bool, gpu: Gpu, units: Units, slices: int
) -> Plan:
    """Return the plan for the gradient of blocks ``[depth, width]``; ``slices`` programs share an output pixel.

    The output gradients of an output pixel, of all samples, are loaded once for all of its blocks if they and two tiles
    of the input fit into half of the shared memory.
    """
    kind = kind_of(dtype, tf32)
    most = MOST[kind]
    depth_tile, width_tile = _power(depth, most.block), _power(width, most.block)
    whole = _power(batch, min(_most_by_hand(depth_tile, units[0], dtype), _most_by_hand(width_tile, units[1], dtype)))
    needed = whole * (2 * depth_tile + width_tile) * dtype.itemsize + depth_tile * width_tile * 4
    fits = whole >= batch and kind in ("half", "tf32") and needed <= gpu.shared_memory // 2
    samples = whole if fits else min(whole, most.summed)
    parts = 1 if samples >= batch else 2
    # Small copies need many addresses, and each takes two registers.
    many = min(units) * dtype.itemsize < 16 and depth_tile * width_tile >= 64 * 64
    warps = 8 if depth_tile * width_tile > most.accumulated or samples > 128 or many else 4
    form = Form(samples, depth_tile, width_tile, parts=parts, slices=slices, **_common(kind, units))
    return Plan(form, warps, _stages(3, kind, gpu))


def slices_of(blocks_of_a_row: float) -> int:
    """Return the number of programs that share the gradients of an output pixel's blocks."""
    return max(1, round(blocks_of_a_row / BLOCKS_OF_A_PROGRAM))


@_cached
def depthwise(batch: int, channels: int, dtype: torch.dtype, units: Units, slices: int = 1) -> Plan:
    """Return the plan for blocks of one element."""
    width = min(triton.next_power_of_2(channels), DEPTHWISE_CHANNELS)
    samples = min(triton.next_power_of_2(max(batch, 1)), DEPTHWISE_ELEMENTS // width)
    kind = kind_of(dtype, tf32=False)
    form = Form(samples, 1, width, slices=slices, **_common(kind, units))
    return Plan(form, warps=max(1, min(4, samples * width // 128)), stages=3)
