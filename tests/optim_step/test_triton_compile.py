"""Tests of the code that the optimizer step's Triton kernels compile to, for GPUs that this machine need not have.

The tests call the launcher itself; instead of a launch, its kernels are compiled for the arguments that they received.
"""

from dataclasses import replace
from unittest.mock import MagicMock, call

import pytest
import torch
from loco_ext.triton_kernels.uploads import Uploads

from bench.ahead_of_time import launches
from tests.covering import slow
from tests.optim_step.cases import Case, make_case
from tests.optim_step.interpreter import BLOCK
from tests.optim_step.layouts import permuted, shifted
from tests.triton_runs import count, needs_compiler, vectors

pytestmark = needs_compiler

THREADS = 256  # per block
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
SHAPE = (5000, 3)
VARIANTS = {
    "sgd": ("sgd", {}),
    "sgd_mixed": ("sgd", {"dtypes": (BF16, F16, F32), "seed": 3, "nesterov": True, "maximize": True}),
    "sgd_double": ("sgd", {"dtypes": (F64,) * 3, "l1": True}),
    "adam": ("adam", {}),
    "adamw": ("adam", {"states": 3, "amsgrad": True, "decoupled": True}),
    "adam_half": ("adam", {"dtypes": (BF16,) * 3, "states": 3, "amsgrad": True, "seed": 3}),
    "adam_double": ("adam", {"dtypes": (F64,) * 3}),
}
# Number of multiply-adds per element in the source.
FUSED = {"sgd": 3, "sgd_mixed": 4, "sgd_double": 3, "adam": 3, "adamw": 2, "adam_half": 3, "adam_double": 3}


def case_of(variant: str, **options) -> Case:
    rule, given = VARIANTS[variant]
    return make_case(rule, [SHAPE], **given, **options)


def compiled(case: Case, backend: str = "cuda", arch: int | str = 90, wide: bool = False) -> dict[str, str]:
    """Return the text of each kernel of a step, by name; ``wide``: elements are numbered with 64 bits."""
    from loco_ext.triton_kernels import optim_step

    form_of, warps = optim_step.form_of, 4 if backend == "hip" else 8
    changes = {"_UPLOADS": Uploads(), "WARPS": warps, "form_of": lambda *args: replace(form_of(*args), wide=wide)}
    kernels, target = ("prepare_kernel", "step_kernel"), (backend, arch)
    launched = launches(lambda: optim_step.optim_step(case.arguments()), optim_step, kernels, target, **changes)
    assert all(options["enable_fp_fusion"] is False for _name, _grid, options, _kernel in launched)
    return {name: kernel.asm["amdgcn" if backend == "hip" else "ptx"] for name, _grid, _options, kernel in launched}


def ptx(case: Case, **options) -> str:
    return compiled(case, **options)["step_kernel"]


def fused(text: str) -> int:
    """Return the number of fused multiply-adds; an instruction may contain two."""
    return count(r"\bfma\.rn", text) + count(r"\bfma\.rn\S*x2\b", text)


def per_thread(case: Case, *without: str) -> int:
    """Return the number of 16-byte accesses that each thread of a block needs for its elements of the case's lists."""
    lists = [tensors for name, tensors in case.lists.items() if tensors and name not in ("steps", *without)]
    return sum(BLOCK * tensors[0].element_size() // (16 * THREADS) for tensors in lists)


@pytest.mark.parametrize(
    ("variant", "arch"),
    [
        ("adam_half", 90),
        *map(slow, [("sgd", 80), ("sgd_mixed", 90), ("sgd_mixed", 100), ("sgd_double", 100)]),
        *map(slow, [("adam", 80), ("adam", 100), ("adamw", 100), ("adam_half", 80), ("adam_double", 90)]),
    ],
)
def test_whole_blocks_are_accessed_in_16_bytes_and_only_written_multiply_adds_are_fused(variant, arch):
    case = case_of(variant)
    text = ptx(case, arch=arch)
    assert vectors(text) == (per_thread(case), per_thread(case, "grads"))
    per_element = BLOCK // THREADS * 2  # the code exists twice, once for partial blocks
    assert fused(text) == FUSED[variant] * per_element
    assert count(r"\bmad\S*\.f\d\d|\.approx|\.ftz|div\.full", text) == 0
    if case.rule == "adam":
        wide = "f64" if case.params[0].dtype == F64 else "f32"
        assert count(rf"div\.rn\.{wide}", text) == 2 * per_element
        assert count(rf"sqrt\.rn\.{wide}", text) == per_element


def test_float32_operands_that_are_not_aligned_are_accessed_one_by_one():
    assert vectors(ptx(case_of("sgd").laid_out(params=lambda t: shifted(t, 1)))) == (0, 0)


@pytest.mark.parametrize(("variant", "wide"), [slow(("sgd_mixed", True)), ("adamw", False)])
def test_other_layouts_and_64_bit_numbers_of_elements_compile(variant, wide):
    case = case_of(variant, grad_scale=torch.ones(()), found_inf=torch.zeros(()))
    text = ptx(case.laid_out(params=lambda t: permuted(t, [1, 0])), wide=wide)
    assert count(r"\.approx|\.ftz|div\.full", text) == 0
    assert (count(r"div\.[su]64|rem\.[su]64", text) > 0) == wide


@pytest.mark.slow
def test_gradients_are_divided_and_written_in_16_bytes():
    case, scale = case_of("sgd"), torch.ones((), dtype=F64)
    plain, scaled = ptx(case), ptx(case.copy(grad_scale=scale, found_inf=scale))
    assert vectors(scaled)[1] == vectors(plain)[1] + per_thread(case, "params", "momentum_buffers")
    assert count(r"div\.rn\.f32", plain) == 0
    assert count(r"div\.rn\.f32", scaled) > 0


def test_the_kernel_that_counts_steps_compiles_without_fused_operations():
    text = compiled(case_of("adam", found_inf=torch.zeros(())))["prepare_kernel"]
    assert count(r"\bfma|\.approx|\.ftz|div\.full", text) == 0
    assert count(r"div\.rn\.f64", text) > 0
    assert count(r"sqrt\.rn\.f64", text) > 0


@pytest.mark.parametrize("variant", [*map(slow, ["sgd_mixed", "sgd_double", "adam", "adam_half"])])
def test_kernels_compile_for_amd(variant):
    text = compiled(case_of(variant), "hip", "gfx942")["step_kernel"]
    assert count(r"(?:global|buffer)_load_dwordx4", text) > 0
    assert count(r"(?:global|buffer)_store_dwordx4", text) > 0


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_launches_have_a_program_for_each_block_and_numbers_that_keep_their_types(rule, monkeypatch):
    from loco_ext.triton_kernels import optim_step

    # Mocks record the launches: mock[grid](arguments).
    mocks = {name: MagicMock(names=getattr(optim_step, name).arg_names) for name in ("prepare_kernel", "step_kernel")}
    for name, mock in mocks.items():
        monkeypatch.setattr(optim_step, name, mock)
    case = make_case(rule, [(3, 3), (5000,), (0,)], seed=2**40, rounding_step=7)
    optim_step.optim_step(case.arguments())
    assert mocks["prepare_kernel"].__getitem__.call_args_list == [call((3,))] * (rule == "adam")
    mocks["step_kernel"].__getitem__.assert_called_once_with((4,))
    for mock in mocks.values():
        for made in mock.__getitem__.return_value.call_args_list:
            named = dict(zip(mock.names, made.args, strict=False)) | made.kwargs
            assert not any(isinstance(value, float) for value in named.values())  # Triton would pass it as float32
    assert named["num_warps"] * 32 == THREADS
    assert [named[name] for name in ("seed_low", "seed_high", "rounding_step")] == [0, 2**8, 7]
