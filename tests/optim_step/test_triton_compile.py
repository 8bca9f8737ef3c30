"""Tests of the code that the optimizer step's Triton kernels compile to, for GPUs that this machine need not have."""

from dataclasses import replace
from unittest.mock import MagicMock, call

import pytest

from bench.ahead_of_time import gpu
from tests.covering import slow
from tests.optim_step.cases import make_case
from tests.optim_step.interpreter import BLOCK
from tests.triton_runs import count, needs_compiler, vectors

pytestmark = needs_compiler

THREADS = 256  # per block, as in the launcher


def make_form(rule: str, *dtypes: str, **options):
    import triton.language as tl
    from loco_ext.triton_kernels.optim_step_kernels import OPERANDS, StepForm

    types = tuple(getattr(tl, dtype) for dtype in dtypes)
    form = StepForm(rule, (*types, *(None,) * (OPERANDS - len(types))), True, True, False, False, False)
    return replace(form, **options)


def compiled(target, form, scale: str | None = None):
    """Return the compilation stages by name, as for the launcher; ``scale`` is the type of grad_scale and found_inf."""
    import triton
    from loco_ext.triton_kernels.optim_step_kernels import step_kernel
    from triton.compiler import ASTSource

    sections = ("hyper_at", "lrs_at", "entries_at", "nests_at", "maps_at", "chunks_at")
    types = {"table": "*u8", **dict.fromkeys(sections, "i32")}
    types |= {"scalars": "constexpr" if form.rule == "sgd" else "*fp64"}
    types |= {name: scale or "constexpr" for name in ("grad_scale", "found_inf")}
    types |= {"seed_low": "i32", "seed_high": "i32", "rounding_step": "i32", "FORM": "constexpr"}
    constants = {"FORM": form} | ({} if scale else {"grad_scale": None, "found_inf": None})
    constants |= {"scalars": None} if form.rule == "sgd" else {}
    attributes = {(0,): [["tt.divisibility", 16]]}
    source = ASTSource(step_kernel, types, constants, attributes)
    return triton.compile(
        source, target=target, options={"num_warps": THREADS // target.warp_size, "enable_fp_fusion": False}
    ).asm


def ptx(arch: int, form, **options) -> str:
    return compiled(gpu("cuda", arch), form, **options)["ptx"]


def fused(text: str) -> int:
    """Return the number of fused multiply-adds; an instruction may contain two."""
    return count(r"\bfma\.rn", text) + count(r"\bfma\.rn\S*x2\b", text)


def per_thread(*dtypes: str) -> int:
    """Return the number of 16-byte accesses that each thread of a block needs for its elements."""
    widths = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
    return sum(BLOCK * widths[dtype] // (16 * THREADS) for dtype in dtypes)


SGD = ("float32",) * 3
VARIANTS = {
    "sgd": ("sgd", SGD, {}),
    "sgd_mixed": ("sgd", ("bfloat16", "float16", "float32"), {"stochastic": True, "nesterov": True, "maximize": True}),
    "sgd_double": ("sgd", ("float64",) * 3, {"l1": True}),
    "adam": ("adam", ("float32",) * 4, {}),
    "adamw": ("adam", ("float32",) * 5, {"amsgrad": True, "decoupled": True}),
    "adam_half": ("adam", ("bfloat16",) * 5, {"amsgrad": True, "stochastic": True}),
    "adam_double": ("adam", ("float64",) * 4, {}),
}
# Number of multiply-adds per element in the source.
FUSED = {"sgd": 3, "sgd_mixed": 4, "sgd_double": 3, "adam": 3, "adamw": 2, "adam_half": 3, "adam_double": 3}


@pytest.mark.parametrize(
    ("variant", "arch"),
    [
        *(("sgd_mixed", 90), ("adam_half", 90)),
        *map(slow, [("sgd", 80), ("sgd_mixed", 100), ("sgd_double", 100)]),
        *map(slow, [("adam", 80), ("adam", 90), ("adam", 100), ("adamw", 100), ("adam_half", 80), ("adam_double", 90)]),
    ],
)
def test_whole_blocks_are_accessed_in_16_bytes_and_only_written_multiply_adds_are_fused(variant, arch):
    rule, dtypes, options = VARIANTS[variant]
    text = ptx(arch, make_form(rule, *dtypes, **options))
    loads, stores = vectors(text)
    written = [dtypes[0], *dtypes[2:]]
    assert loads == per_thread(*dtypes)
    assert stores == per_thread(*written)
    per_element = BLOCK // THREADS * 2  # the code exists twice, once for partial blocks
    assert fused(text) == FUSED[variant] * per_element
    assert count(r"\bmad\S*\.f\d\d|\.approx|\.ftz|div\.full", text) == 0
    if rule == "adam":
        wide = "f64" if dtypes[0] == "float64" else "f32"
        assert count(rf"div\.rn\.{wide}", text) == 2 * per_element
        assert count(rf"sqrt\.rn\.{wide}", text) == per_element


def test_float32_operands_that_are_not_aligned_are_accessed_one_by_one():
    text = ptx(90, make_form("sgd", *SGD, aligned=False))
    assert vectors(text) == (0, 0)


@pytest.mark.parametrize(("variant", "wide"), [("sgd_mixed", True), ("adamw", False)])
def test_other_layouts_and_64_bit_numbers_of_elements_compile(variant, wide):
    rule, dtypes, options = VARIANTS[variant]
    text = ptx(90, make_form(rule, *dtypes, **options, flat=False, aligned=False, wide=wide), scale="*fp32")
    assert count(r"\.approx|\.ftz|div\.full", text) == 0
    assert (count(r"div\.[su]64|rem\.[su]64", text) > 0) == wide


def test_gradients_are_divided_and_written_in_16_bytes():
    plain, scaled = (ptx(90, make_form("sgd", *SGD), scale=s) for s in (None, "*fp64"))
    assert vectors(scaled)[1] == vectors(plain)[1] + per_thread("float32")
    assert count(r"div\.rn\.f32", plain) == 0
    assert count(r"div\.rn\.f32", scaled) > 0


def test_the_kernel_that_counts_steps_compiles_without_fused_operations():
    import triton
    from loco_ext.triton_kernels.optim_step_kernels import prepare_kernel
    from triton.compiler import ASTSource

    types = {"table": "*u8", "hyper_at": "i32", "lrs_at": "i32", "entries_at": "i32"}
    types |= {"found_inf": "*fp32", "scalars": "*fp64"}
    source = ASTSource(prepare_kernel, types, {}, {})
    options = {"num_warps": 1, "enable_fp_fusion": False}
    text = triton.compile(source, target=gpu("cuda", 90), options=options).asm["ptx"]
    assert count(r"\bfma|\.approx|\.ftz|div\.full", text) == 0
    assert count(r"div\.rn\.f64", text) > 0
    assert count(r"sqrt\.rn\.f64", text) > 0


@pytest.mark.parametrize("variant", ["sgd_mixed", slow("sgd_double"), slow("adam"), slow("adam_half")])
def test_kernels_compile_for_amd(variant):
    rule, dtypes, options = VARIANTS[variant]
    text = compiled(gpu("hip", "gfx942"), make_form(rule, *dtypes, **options))["amdgcn"]
    assert count(r"(?:global|buffer)_load_dwordx4", text) > 0
    assert count(r"(?:global|buffer)_store_dwordx4", text) > 0


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_the_launcher_asks_for_what_is_tested_here(rule, monkeypatch):
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
            assert named["enable_fp_fusion"] is False
            assert not any(isinstance(value, float) for value in named.values())  # Triton would pass it as float32
    assert named["num_warps"] * 32 == THREADS
    assert named["FORM"].aligned
    assert [named[name] for name in ("seed_low", "seed_high", "rounding_step")] == [0, 2**8, 7]
