"""Tests of the optimizer step's Triton kernels in Triton's interpreter, beyond those that all kernels share."""

import itertools
import math
from decimal import Context, Decimal

import pytest
import torch

from loco_ext.reference.rounding import philox
from tests.optim_step.cases import assert_native_is_reference, assert_same, make_case, with_kernels
from tests.optim_step.interpreter import BLOCK, far, scalars
from tests.optim_step.layouts import KINDS, LAYOUTS, gaps, shifted
from tests.optim_step.maps import ANY_MAP, LOCO_2D
from tests.tolerances import same_bits
from tests.triton_runs import interpret, needs_mmap, needs_triton

pytestmark = [needs_triton, pytest.mark.usefixtures("kernels"), with_kernels("interpreter")]

NARROW = 2**31 - BLOCK  # most elements whose indices fit into 32 bits


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999999, 1 - 2**-53, 5e-324])
def test_powers_of_beta_are_rounded_once(interpreter, beta):
    steps = [1, 2, 3, 7, 100, 1000, 65535, 10**7]
    hyper = (0.5, 0.0, beta, beta, 1e-8)
    case = make_case("adam", [()] * len(steps), hyper=hyper)
    case.lists["steps"] = [torch.tensor(float(t - 1), dtype=(torch.float32, torch.float64)[t % 2]) for t in steps]
    actual = interpret(interpreter.pool, scalars, case)
    powers = [float(Context(prec=60, Emin=-(10**9), Emax=10**9).power(Decimal(beta), t)) for t in steps]
    assert actual[:, 6].tolist() == [-(0.5 / (1 - power)) for power in powers]
    assert actual[:, 7].tolist() == [math.sqrt(1 - power) for power in powers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_tensors_of_one_or_more_blocks_give_the_references_bits(dtype):
    sizes = [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK]
    shapes = [*((size,) for size in sizes), (40, 30, 3, 3), (9, 7), (20, 11, 5, 5)]
    options = {"maps": [LOCO_2D, ANY_MAP["5x5"][1]], "map_index": [-1] * len(sizes) + [0, -1, 1], "seed": 3}
    case = make_case("sgd", shapes, dtypes=[dtype] * 3, **options)
    expected = case.copy().step("reference")
    for name, tensors in case.lists.items():  # every second tensor can be accessed in vectors
        case.lists[name] = [shifted(t, (8, 1)[i % 2]) for i, t in enumerate(tensors)]
    before = [gaps(tensor) for tensor in itertools.chain(*case.lists.values())]
    assert_same(case.step(), expected)
    assert all(map(same_bits, map(gaps, itertools.chain(*case.lists.values())), before))


@pytest.mark.parametrize("kind", ["half", "rounded"])
def test_elements_numbered_in_64_bits_give_the_references_bits(interpreter, kind):
    case = make_case("sgd", [(6, 5, 3, 3), (70, 11, 3, 3)], maps=[LOCO_2D], map_index=[0, 0], **KINDS[kind])
    case.params[1] = LAYOUTS["taps_slowest"](case.params[1])
    interpreter.wide = True
    assert_native_is_reference(case)


@needs_mmap
@pytest.mark.parametrize(
    ("numel", "wide", "stride"), [(NARROW, False, 1), (NARROW, False, 3), (NARROW + 1, True, 1), (2**32 + 100, True, 3)]
)
def test_elements_beyond_2_to_the_31_are_stepped(interpreter, numel, wide, stride):
    w, g = interpret(interpreter.pool, far, numel, stride, wide)
    elements = torch.arange(numel - len(w), numel)
    bits = (1 - 0.25 * g).view(torch.int32)
    random = philox(elements, seed=5, tensor=0, step=3)[0]
    rounded = (bits + (random & 0xFFFF).to(torch.int32)) & ~0xFFFF
    assert same_bits(w, rounded.view(torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_special_numbers_are_rounded_to_half_precision_as_in_torch(dtype):
    """NaN of any bits stays NaN, and float64 is rounded by way of float32."""
    nan = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    for seed in (None, 3):
        case = make_case("sgd", [(4,)], dtypes=[dtype, torch.float32, dtype], first=[1], seed=seed)
        case.hyper[0, 1] = 0  # no decay: the buffer becomes the gradient as it is
        case.lists["grads"] = [nan]
        case.step()
        assert case.params[0].isnan().all()
        assert case.lists["momentum_buffers"][0].isnan().all()
    middle = [1 + 2**-11 + 2**-40, 1 + 3 * 2**-11 - 2**-40, 1 + 2**-8 + 2**-40, 1 + 3 * 2**-8 - 2**-40]
    case = make_case("sgd", [(4,)], dtypes=[torch.float64, torch.float64, dtype], first=[1])
    case.hyper[0, 1] = 0
    case.lists["grads"] = [torch.tensor(middle, dtype=torch.float64)]
    assert_native_is_reference(case)
