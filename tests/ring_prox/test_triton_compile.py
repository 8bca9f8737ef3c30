"""Tests of the code that ring_prox's Triton kernels compile to, for GPUs that this machine need not have.

The tests call the launcher itself; instead of a launch, the kernel is compiled for the arguments that it received.
"""

import re
from functools import partial
from typing import Any

import pytest
import torch
from loco_ext.triton_kernels.uploads import Uploads
from torch import Tensor

from bench.ahead_of_time import launches, resources
from tests.covering import slow
from tests.ring_prox.cases import rings_of
from tests.triton_runs import count, needs_compiler, vectors

pytestmark = needs_compiler

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
Target = tuple[str, int | str]
H100 = ("cuda", 90)


def launched(target: Target, weight: Tensor, operator: str, *arguments: Any):
    """Return the grid, the options and the compiled kernel of an operator's launch."""
    from loco_ext.triton_kernels import ring_prox

    call = partial(getattr(ring_prox, operator), weight, rings_of(weight.shape)[0], *arguments)
    ((_, *launch),) = launches(call, ring_prox, ("norms_kernel", "prox_kernel"), target, _UPLOADS=Uploads())
    return launch


def prox(target: Target, weight: Tensor, metric: Tensor | None = None, linf: bool = False, squared: bool = False):
    t = torch.ones(rings_of(weight.shape)[1], dtype=F64)
    return launched(target, weight, "ring_prox", t, t if squared else None, metric, linf)


def operands(mode: str, channels_last: bool) -> tuple:
    dtype, metric, linf, squared = MODES[mode]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    weight, d = (
        None if t is None else torch.ones(8, 512, 3, 3, dtype=t).to(memory_format=layout) for t in (dtype, metric)
    )
    return weight, d, linf, squared


MODES = {  # weight, metric, linf, squared
    "l2": (F32, None, False, False),
    "l2_squared": (F32, None, False, True),
    "double": (F64, F64, False, True),
    "metric": (F32, F32, False, False),
    "metric_squared": (BF16, F32, False, True),
    "linf": (F16, None, True, False),
    "linf_squared": (F32, BF16, True, True),
}
NOT_IEEE = r"\bfma\.rn|\bmad\S*\.f\d\d|\.approx|\.ftz|div\.full"
STORES = {F64: r"st\.global\S*\.v2\.b64", F32: r"st\.global\S*\.v4\.b32", BF16: r"st\.global\S*\.v2\.b32"}
STORES[F16] = STORES[BF16]


def assert_ieee(options, text):
    assert options["enable_fp_fusion"] is False
    assert count(NOT_IEEE, text) == 0


@pytest.mark.parametrize(
    ("mode", "arch"),
    [
        *(("l2", 90), ("linf_squared", 90)),
        *map(slow, [*((mode, 90) for mode in ("l2_squared", "metric", "metric_squared", "linf"))]),
        *map(slow, [("l2", 80), ("double", 100)]),
    ],
)
def test_cuda_kernels_round_as_ieee_asks_keep_numbers_in_registers_and_access_channels_in_vectors(mode, arch):
    texts = []
    for channels_last in (False, True):
        grid, options, kernel = prox(("cuda", arch), *operands(mode, channels_last))
        assert grid == (8,)
        texts.append(kernel.asm["ptx"])
        assert_ieee(options, texts[-1])
        assert count(r"sqrt\.rn\.f64", texts[-1]) > 0 or options["FORM"].linf
        assert count(r"div\.rn\.f64", texts[-1]) > 0
        used = resources(kernel.asm["cubin"])
        assert used["REG"] <= 128  # then two programs of 256 threads fit
        assert used["STACK"] <= 32
    one_by_one, text = texts
    dtype = MODES[mode][0]
    assert count(STORES[dtype], text) > 0
    assert count(STORES[dtype], one_by_one) == 0
    assert vectors(one_by_one) == (0, 0)
    if dtype in (F32, F64):
        assert vectors(text)[0] > 0
    if mode == "l2":  # each thread's four weights are read for their squares and for the result
        assert vectors(text) == (2, 1)


@pytest.mark.parametrize(
    ("shape", "vectors_too"),
    [*map(slow, [((7, 1, 3, 3), False), ((8, 512), True), ((8, 500, 1, 1), False)])],
)
def test_other_shapes_compile(shape, vectors_too):
    weight = torch.ones(shape)
    for metric, squared in ((None, False), (weight.double(), True)):
        text = prox(H100, weight, metric, False, squared)[2].asm["ptx"]
        assert (vectors(text)[1] > 0) == vectors_too
    prox(H100, weight, weight.half(), True, True)


def test_weights_that_are_not_aligned_are_accessed_one_by_one():
    aligned = torch.ones(8, 512)
    moved = torch.ones(8 * 512 + 1)[1:].view(8, 512)
    shifted = torch.ones(8, 3, 3, 528)[..., :512].permute(0, 3, 1, 2)
    odd = torch.ones(8, 3, 3, 513)[..., :512].permute(0, 3, 1, 2)
    loads = [vectors(prox(H100, weight)[2].asm["ptx"])[0] for weight in (aligned, moved, shifted, odd)]
    assert [bool(number) for number in loads] == [True, False, True, False]


@pytest.mark.parametrize(("dtype", "arch"), [(F32, 90), *map(slow, [(F64, 100), (BF16, 80)])], ids=str)
def test_norms_compile(dtype, arch):
    weight = torch.ones(8, 512, 3, 3, dtype=dtype)
    grid, options, kernel = launched(("cuda", arch), weight, "ring_norms", rings_of(weight.shape)[1])
    assert grid == (8,)
    assert_ieee(options, kernel.asm["ptx"])
    assert count(r"sqrt\.rn\.f64", kernel.asm["ptx"]) > 0


@pytest.mark.parametrize("mode", [*map(slow, ["l2", "metric_squared", "linf_squared"])])
def test_kernels_compile_for_amd(mode):
    for channels_last in (False, True):
        _grid, options, kernel = prox(("hip", "gfx942"), *operands(mode, channels_last))
        assert options["num_warps"] == 4
        assert re.findall(r"vgpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"]) == ["0"]


@pytest.mark.parametrize(
    ("shape", "block", "warps"),
    [((64, 1, 3, 3), 32, 1), ((64, 64, 3, 3), 512, 4), ((64, 4096, 3, 3), 1024, 8)],
)
def test_a_program_is_as_large_as_its_rings(shape, block, warps):
    _grid, options, _kernel = prox(H100, torch.empty(shape))
    assert (options["FORM"].block, options["num_warps"]) == (block, warps)
