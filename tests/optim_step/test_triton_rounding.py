"""Tests of dtype conversions and stochastic rounding by the optimizer step's Triton kernels."""

import pytest
import torch

from tests.optim_step.cases import make_case
from tests.optim_step.interpreter import BLOCK, assert_is_reference
from tests.optim_step.layouts import LAYOUTS
from tests.triton_runs import needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize("seed", [None, 3])
def test_nan_of_any_bits_stays_nan_in_half_precision(interpreter, seed):
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16):
        case = make_case("sgd", [(4,)], dtypes=[dtype, torch.float32, dtype], first=[1], seed=seed)
        case.hyper[0, 1] = 0  # no decay: the buffer becomes the gradient as it is
        case.lists["grads"] = [bits.view(torch.float32)]
        stepped = interpreter.step(case)
        assert stepped.params[0].isnan().all()
        assert stepped.lists["momentum_buffers"][0].isnan().all()


def test_float64_is_rounded_to_half_precision_by_way_of_float32_as_in_torch(interpreter):
    middle = [1 + 2**-11 + 2**-40, 1 + 3 * 2**-11 - 2**-40, 1 + 2**-8 + 2**-40, 1 + 3 * 2**-8 - 2**-40]
    for dtype in (torch.bfloat16, torch.float16):
        case = make_case("sgd", [(4,)], dtypes=[torch.float64, torch.float64, dtype], first=[1])
        case.hyper[0, 1] = 0
        case.lists["grads"] = [torch.tensor(middle, dtype=torch.float64)]
        assert_is_reference(interpreter, case)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**63 - 1])
def test_stochastic_rounding_gives_the_references_bits(interpreter, seed):
    options = {"seed": seed, "rounding_step": seed >> 3, "ordinals": [2**31 + 5, 0]}
    shapes = [(5, 4, 3, 3), (BLOCK + 77,)]
    case = make_case("adam", shapes, dtypes=[torch.bfloat16] * 3, states=3, amsgrad=True, **options)
    case.params[0] = LAYOUTS["channels_last"](case.params[0])
    assert_is_reference(interpreter, case)
    without = interpreter.step(case.copy(seed=None))
    assert not torch.equal(without.params[1], interpreter.step(case).params[1])
