"""The tiles of block-sparse multiplication in Triton, chosen by sizes, dtype and the GPU's shared memory.

What decides: a block of values is to be read from memory once, so a program takes as many samples as it can, up to 256;
two programs are to fit on a multiprocessor, so that one loads while the other stores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from loco_ext.triton_kernels.block_sparse_kernels import Form

LEAST = 16  # of every size of a tile of tl.dot
UNIT = 16  # elements, at most
Units = tuple[int, int]  # of x and of y
BLOCKS_OF_A_PROGRAM = 16  # about so many gradients of blocks
DEPTHWISE_ELEMENTS, DEPTHWISE_CHANNELS = 2048, 64  # of a tile


@dataclass(frozen=True)
class Most:
    """The largest tiles of a kind of arithmetic."""

    samples: int
    summed: int  # channels that are summed over, or samples where the batch does not fit
    channels: int  # of the product
    few_samples: int  # where it has more than 64 channels
    block: int  # channels on either side of a block's gradient
    accumulated: int  # elements of a result of 4 warps; more have 8


MOST = {
    "half": Most(256, 64, 128, 128, 128, 128 * 64),
    "tf32": Most(256, 32, 128, 128, 64, 128 * 64),
    "ieee": Most(128, 16, 64, 128, 64, 64 * 64),  # no tensor cores: what a thread multiplies is in registers
    "double": Most(64, 16, 64, 64, 64, 32 * 32),
}


@dataclass(frozen=True)
class Plan:
    """How a kernel is compiled."""

    form: Form
    warps: int
    stages: int

    def options(self) -> dict[str, Any]:
        """What it is launched with."""
        return {"FORM": self.form, "num_warps": self.warps, "num_stages": self.stages}


def kind_of(dtype: torch.dtype, tf32: bool) -> str:
    """The kind of arithmetic."""
    if dtype == torch.float64:
        return "double"
    return "half" if dtype.itemsize == 2 else "tf32" if tf32 else "ieee"


def unit_of(*sizes: int) -> int:
    """The largest power of 2 up to UNIT that divides all."""
    return math.gcd(UNIT, *sizes)


def _power(size: int, most: int) -> int:
    """Of 2, for as many as there are."""
    return min(max(triton.next_power_of_2(size), LEAST), most)


def _common(kind: str, units: Units) -> dict[str, Any]:
    return {
        "x_unit": units[0],
        "y_unit": units[1],
        "sums": tl.float64 if kind == "double" else tl.float32,
        "precision": "tf32" if kind == "tf32" else "ieee",
    }


def _most_by_hand(depth: int, unit: int, dtype: torch.dtype) -> int:
    """How many samples can be loaded at a time: without copies past the registers, which need 4 bytes, only some."""
    return 2048 // depth if unit * dtype.itemsize < 4 else 256


def product(
    batch: int, summed: int, channels: int, dtype: torch.dtype, tf32: bool, shared: int, units: Units, turned: bool
) -> Plan:
    """For the product of samples by blocks ``[summed, channels]``; shared: bytes of shared memory."""
    kind = kind_of(dtype, tf32)
    most = MOST[kind]
    width, depth = _power(channels, most.channels), _power(summed, most.summed)
    by_hand = _most_by_hand(depth, units[0], dtype)
    samples = _power(batch, min(by_hand, most.few_samples if width > 64 else most.samples))
    while 2 * _stage(samples, depth, width, dtype) > shared:
        samples //= 2
    # One stage computes; as many as there are tiles loaded ahead, two or one, load them, and as many their pixels.
    stages = 5 if 3 * _stage(samples, depth, width, dtype) <= shared // 4 and by_hand == 256 else 3
    parts = triton.cdiv(summed, depth)
    warps = 8 if samples * width > most.accumulated else 4
    return Plan(Form(samples, depth, width, parts=parts, turned=turned, **_common(kind, units)), warps, stages)


def _stage(samples: int, depth: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of what is loaded at a time."""
    return (samples + width) * depth * dtype.itemsize


def gradient(
    batch: int, depth: int, width: int, dtype: torch.dtype, tf32: bool, shared: int, units: Units, slices: int
) -> Plan:
    """For the gradient of blocks ``[depth, width]``, an output pixel's by ``slices`` programs.

    The gradients of an output pixel, of all samples, are loaded once for all of its blocks if they and two tiles of the
    input fit into half of the shared memory.
    """
    kind = kind_of(dtype, tf32)
    most = MOST[kind]
    depth_tile, width_tile = _power(depth, most.block), _power(width, most.block)
    whole = _power(batch, min(_most_by_hand(depth_tile, units[0], dtype), _most_by_hand(width_tile, units[1], dtype)))
    needed = whole * (2 * depth_tile + width_tile) * dtype.itemsize + depth_tile * width_tile * 4
    fits = whole >= batch and kind in ("half", "tf32") and needed <= shared // 2
    samples = whole if fits else min(whole, most.summed)
    parts = 1 if samples >= batch else 2
    # Small copies need many addresses, each in two registers.
    many = min(units) * dtype.itemsize < 16 and depth_tile * width_tile >= 64 * 64
    warps = 8 if depth_tile * width_tile > most.accumulated or samples > 128 or many else 4
    form = Form(samples, depth_tile, width_tile, parts=parts, slices=slices, **_common(kind, units))
    return Plan(form, warps, stages=3)


def slices_of(blocks_of_a_row: float) -> int:
    """Programs for the gradients of an output pixel's blocks."""
    return max(1, round(blocks_of_a_row / BLOCKS_OF_A_PROGRAM))


def depthwise(batch: int, channels: int, dtype: torch.dtype, units: Units, slices: int = 1) -> Plan:
    """For blocks of one number."""
    width = min(triton.next_power_of_2(channels), DEPTHWISE_CHANNELS)
    samples = min(triton.next_power_of_2(max(batch, 1)), DEPTHWISE_ELEMENTS // width)
    kind = kind_of(dtype, tf32=False)
    form = Form(samples, 1, width, slices=slices, **_common(kind, units))
    return Plan(form, warps=max(1, min(4, samples * width // 128)), stages=3)
