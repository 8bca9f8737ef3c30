"""Tile sizes of block-sparse multiplication in Triton, chosen by sizes, dtype and the GPU's shared memory.

Three aims decide: a block of values is read from memory once, so a program takes as many samples as it can, up to 256;
two programs fit on a multiprocessor, so that one loads while the other stores; a small layer has programs for all
multiprocessors. `python -m bench.estimate_block_sparse` shows what the kernels take on several GPUs.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from loco_ext.triton_kernels.block_sparse_kernels import BlockSparseForm
from loco_ext.triton_kernels.launch import cdiv, next_power_of_2

LEAST = 16  # smallest size of a tile of tl.dot along each axis
UNIT = 16  # largest unit, in elements
Units = tuple[int, int]  # the units of x and of y
BLOCKS_OF_A_PROGRAM = 16  # most blocks, approximately, whose gradients one program computes
NARROW = 64  # channels on either side of a gradient's tile that is narrower than the block
BLOCKS_OF_A_TILE = 4  # most blocks whose gradients are in one tile
SHARED_REGISTERS = 128  # most registers of a thread, of 256, with which two programs fit on a multiprocessor
DEPTHWISE_ELEMENTS, DEPTHWISE_CHANNELS = 2048, 64  # most elements and channels of a depthwise tile

_cached = lru_cache(maxsize=256)  # choosing a plan takes the host as long as all else of a call


@dataclass(frozen=True)
class Most:
    """The largest tiles for a kind of arithmetic."""

    samples: int
    summed: int  # channels that are summed over
    channels: int  # channels of the product
    few_samples: int  # samples if the tile has more than 64 channels
    block: int  # channels on either side of a block's gradient
    part: int  # samples that it is summed over at a time, if the batch does not fit
    accumulated: int  # largest result, in elements, for 4 warps; larger ones take 8


MOST = {
    "half": Most(256, 64, 128, 128, 128, 128, 128 * 64),
    "tf32": Most(128, 64, 128, 128, 128, 64, 64 * 64),
    "ieee": Most(128, 16, 64, 128, 64, 32, 128 * 64),  # no tensor cores: operands are in each thread's registers
    "double": Most(64, 16, 64, 64, 64, 16, 32 * 32),
}


@dataclass(frozen=True)
class GpuLimits:
    """The properties of a GPU that a plan depends on."""

    shared_memory: int  # bytes that a program may use
    fences: bool = True  # whether tensor cores wait for tiles that are copied asynchronously; see puts_fences
    multiprocessors: int = 1
    capability: int = 0  # the major compute capability; 0 for GPUs of other makers

    @property
    def multiplies_registers(self) -> bool:
        """Return whether the tensor cores take their operands from registers instead of shared memory."""
        return self.capability in (8, 12)


def puts_fences(version: str, capability: tuple[int, int]) -> bool:
    """Return whether this version of Triton makes the tensor cores of an NVIDIA GPU wait for asynchronous copies.

    Those of capabilities 9 to 11 read shared memory by themselves (wgmma, tcgen05). Before 3.7.1, Triton left out the
    fence between the copies and them in loops whose number of iterations it does not know, so results may be wrong.
    """
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    return release >= (3, 7, 1) or not 9 <= capability[0] < 12


@dataclass(frozen=True)
class TilePlan:
    """A kernel's compile-time constants and launch options."""

    form: BlockSparseForm
    warps: int
    stages: int
    registers: int | None = None  # most registers of a thread, if limited

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of the launch."""
        limits = {} if self.registers is None else {"maxnreg": self.registers}
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}
        return {"FORM": self.form, **options, **limits}


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
    return min(max(next_power_of_2(size), LEAST), most)


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


def _stages(stages: int, kind: str, gpu: GpuLimits) -> int:
    """Return 1, which copies no tile asynchronously, where tensor cores would not wait for the copies."""
    return stages if gpu.fences or kind not in ("half", "tf32") else 1


@_cached
def product(
    batch: int,
    summed: int,
    channels: int,
    dtype: torch.dtype,
    tf32: bool,
    gpu: GpuLimits,
    units: Units,
    transposed: bool,
    products: int,
) -> TilePlan:
    """Return the plan for products of samples by blocks ``[summed, channels]``.

    Args:
        products: number of output pixels times groups.
    """
    kind, shared = kind_of(dtype, tf32), gpu.shared_memory
    most = MOST[kind]
    width = _power(channels, most.channels)
    tensor_cores, whole_copies = kind in ("half", "tf32"), min(units) * dtype.itemsize >= 16
    # With operands in registers, half of the depth leaves enough of them for a second program.
    depth = _power(summed, most.summed // 2 if tensor_cores and gpu.multiplies_registers else most.summed)
    by_hand = _most_by_hand(depth, units[0], dtype)
    samples = _power(batch, min(by_hand, most.few_samples if width > 64 else most.samples))
    buffers = _stages(2, kind, gpu)
    while buffers * _stage(samples, depth, width, dtype) > shared // 2 and depth > LEAST:
        depth //= 2
    programs = products * cdiv(channels, width)
    samples = _samples_of_a_program(batch, samples, width, programs, gpu.multiprocessors)
    # One stage computes, two or one load the next tiles, and as many load the pixels that tiles further ahead need.
    # Without tensor cores, float32 has the operands in each thread's registers, which two would leave too few of.
    two = 3 * _stage(samples, depth, width, dtype) <= shared // 4 and by_hand == 256 and kind != "ieee"
    parts = cdiv(summed, depth)
    warps = 8 if samples * width > most.accumulated else 4
    # On capability 10, which accumulates outside of registers, the limit would spill some.
    limited = tensor_cores and whole_copies and warps == 8 and gpu.capability in (8, 9, 12)
    form = BlockSparseForm(samples, depth, width, parts=parts, transposed=transposed, **_common(kind, units))
    return TilePlan(form, warps, _stages(5 if two else 3, kind, gpu), SHARED_REGISTERS if limited else None)


def _samples_of_a_program(batch: int, most: int, width: int, programs: int, multiprocessors: int) -> int:
    """Return the samples for which the busiest multiprocessor reads least; ``programs`` would take all of them."""

    def read(samples: int) -> int:
        """Return what it reads for each channel of the input: samples, and columns of a block."""
        rounds = cdiv(programs * cdiv(batch, samples), multiprocessors)
        return rounds * (min(samples, batch) + width)

    sizes = [most]
    while sizes[-1] > LEAST:
        sizes.append(sizes[-1] // 2)
    return min(sizes, key=read)


def _stage(samples: int, depth: int, width: int, dtype: torch.dtype) -> int:
    """Return the bytes of the two tiles that are loaded at a time."""
    return (samples + width) * depth * dtype.itemsize


@_cached
def gradient(
    batch: int,
    depth: int,
    width: int,
    dtype: torch.dtype,
    tf32: bool,
    gpu: GpuLimits,
    units: Units,
    products: int,
    row_blocks: float,
) -> TilePlan:
    """Return the plan for the gradient of blocks ``[depth, width]``.

    With tensor cores, the output gradients of an output pixel, of all samples, are loaded once for all of its blocks if
    they and the tiles of the input fit into the shared memory (see _whole_batch). Otherwise each is loaded once for
    several blocks.

    Args:
        products: number of output pixels times groups.
        row_blocks: number of blocks of an output pixel, on average.
    """
    kind = kind_of(dtype, tf32)
    most, tensor_cores = MOST[kind], kind in ("half", "tf32")
    # In TF32, an H100 takes a third longer with tiles that are loaded ahead.
    stages = 1 if kind == "tf32" and gpu.capability == 9 else _stages(3, kind, gpu)
    depth_tile, width_tile = _power(depth, most.block), _power(width, most.block)
    whole = _whole_batch(batch, depth_tile, width_tile, dtype, gpu, units, stages) if tensor_cores else None
    if whole is not None:
        samples, depth_tile, width_tile = whole
    else:
        depth_tile, width_tile = min(depth_tile, NARROW), min(width_tile, NARROW)
        samples = min(_samples_of_a_gradient(batch, depth_tile, width_tile, dtype, units), most.part)
    parts = 1 if samples >= batch else 2
    # Small copies need many addresses, and each takes two registers.
    many = min(units) * dtype.itemsize < 16 and depth_tile * width_tile >= 64 * 64
    blocks = 1
    while parts > 1 and tensor_cores and not many and blocks < min(BLOCKS_OF_A_TILE, row_blocks):
        if 2 * blocks * depth_tile * width_tile > most.accumulated:
            break
        if samples * (2 * blocks * depth_tile + 2 * width_tile) * dtype.itemsize > gpu.shared_memory:
            break
        blocks *= 2
    large = blocks * depth_tile * width_tile > most.accumulated or samples > (64 if parts > 1 else 128)
    programs = products * cdiv(depth, depth_tile) * cdiv(width, width_tile)
    slices = _slices_of_a_row(row_blocks, programs, gpu.multiprocessors)
    form = BlockSparseForm(
        samples, depth_tile, width_tile, parts=parts, slices=slices, blocks=blocks, **_common(kind, units)
    )
    return TilePlan(form, 8 if large or many else 4, stages)


def _samples_of_a_gradient(batch: int, depth: int, width: int, dtype: torch.dtype, units: Units) -> int:
    """Return the most samples that can be loaded at a time for the gradient of a block ``[depth, width]``."""
    return _power(batch, min(_most_by_hand(depth, units[0], dtype), _most_by_hand(width, units[1], dtype)))


def _whole_batch(
    batch: int, depth: int, width: int, dtype: torch.dtype, gpu: GpuLimits, units: Units, stages: int
) -> tuple[int, int, int] | None:
    """Return samples, depth and width of a tile for all samples of the batch; None if none fits.

    It is narrower than the block if that lets two programs fit on a multiprocessor, and may be so large that only one
    does if all copies have 16 bytes: addresses of smaller ones would take too many registers.
    """
    limits = [gpu.shared_memory // 2, *([gpu.shared_memory] if min(units) * dtype.itemsize >= 16 else [])]
    narrow_depth, narrow_width = min(depth, NARROW), min(width, NARROW)
    tiles = [(depth, width), (narrow_depth, width), (narrow_depth, narrow_width)]
    for limit, (d, w) in itertools.product(limits, tiles):
        samples = _samples_of_a_gradient(batch, d, w, dtype, units)
        # While tiles of the input are loaded ahead, there are two of them beside a result that is rearranged for its
        # store; otherwise there is one, whose memory the result may use.
        inputs, result = (1, 0) if stages == 1 else (2, d * w * 4)
        if samples >= batch and samples * (inputs * d + w) * dtype.itemsize + result <= limit:
            return samples, d, w
    return None


def _slices_of_a_row(row_blocks: float, programs: int, multiprocessors: int) -> int:
    """Return the slices of a row for which the busiest multiprocessor reads least tiles."""

    def read(slices: int) -> float:
        """Return the number of tiles that it reads: one of the output's gradient, and one for each block."""
        return cdiv(programs * slices, multiprocessors) * (1 + row_blocks / slices)

    choices = [slices_of(row_blocks)]
    while 2 * choices[-1] <= row_blocks:
        choices.append(2 * choices[-1])
    return min(choices, key=read)


def slices_of(row_blocks: float) -> int:
    """Return the least number of programs that share the gradients of an output pixel's blocks."""
    return max(1, round(row_blocks / BLOCKS_OF_A_PROGRAM))


@_cached
def depthwise(batch: int, channels: int, dtype: torch.dtype, units: Units, slices: int = 1) -> TilePlan:
    """Return the plan for blocks of one element."""
    width = min(next_power_of_2(channels), DEPTHWISE_CHANNELS)
    samples = min(next_power_of_2(max(batch, 1)), DEPTHWISE_ELEMENTS // width)
    kind = kind_of(dtype, tf32=False)
    form = BlockSparseForm(samples, 1, width, slices=slices, **_common(kind, units))
    return TilePlan(form, warps=max(1, min(4, samples * width // 128)), stages=3)
