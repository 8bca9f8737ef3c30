"""Tests that the optimizer step's Triton kernels give the reference's bits, in Triton's interpreter."""

import math
from dataclasses import replace
from decimal import Context, Decimal

import pytest
import torch

from tests.covering import covering
from tests.optim_step.cases import FLOATS, SHAPES, assert_same, assert_untouched, make_case
from tests.optim_step.interpreter import assert_is_reference, scalars
from tests.optim_step.maps import LOCO_2D
from tests.tolerances import same_bits
from tests.triton_runs import loaded, needs_triton, saved

pytestmark = needs_triton


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999, 0.999999, 1 - 2**-53, 5e-324])
def test_powers_of_beta_are_rounded_once(interpreter, beta):
    steps = [1, 2, 3, 7, 100, 1000, 65535, 10**7]
    hyper = (0.5, 0.0, beta, beta, 1e-8)
    case = make_case("adam", [()] * len(steps), hyper=hyper)
    case.lists["steps"] = [torch.tensor(float(t - 1), dtype=(torch.float32, torch.float64)[t % 2]) for t in steps]
    actual = interpreter.pool.submit(scalars, saved(case)).result()
    powers = [float(Context(prec=60, Emin=-(10**9), Emax=10**9).power(Decimal(beta), t)) for t in steps]
    assert actual[:, 6].tolist() == [-(0.5 / (1 - power)) for power in powers]
    assert actual[:, 7].tolist() == [math.sqrt(1 - power) for power in powers]


def test_decoupled_decay_alone_gives_the_references_bits_in_float64(interpreter):
    decay_map = torch.rand(8, 9, 3, 3, dtype=torch.float64)
    case = make_case("adam", [decay_map.shape], dtypes=[torch.float64] * 3, hyper=(1.7, 0.9, 0.9, 0.99, 1e-8))
    case.options |= {"decoupled": True, "maps": [decay_map], "map_index": [0]}
    for name in ("grads", "exp_avgs"):
        case.lists[name][0].zero_()
    assert same_bits(interpreter.step(case).params[0], case.copy().step("reference").params[0])


@pytest.mark.parametrize(
    ("grad_dtype", "scale"),
    covering(FLOATS, [torch.tensor(1024.0), torch.tensor([3.0], dtype=torch.float64)], strength=1),
    ids=str,
)
def test_gradients_are_divided_by_grad_scale_in_memory_too(interpreter, scale, grad_dtype):
    for rule, param_dtype in ("sgd", torch.float32), ("adam", torch.bfloat16), ("sgd", torch.float64):
        dtypes = [param_dtype, grad_dtype, torch.float32]
        case = make_case(rule, SHAPES, dtypes=dtypes, grad_scale=scale, found_inf=torch.tensor(0.0), maximize=True)
        assert_is_reference(interpreter, case)


@pytest.mark.parametrize("found", [1.0, math.nan, math.inf])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_nothing_changes_where_infinity_was_found(interpreter, rule, found):
    found_inf = torch.tensor([found], dtype=torch.float64 if found == 1 else torch.float32)
    case = make_case(rule, [*SHAPES, (3000,)], found_inf=found_inf, grad_scale=torch.tensor(2.0))
    assert_untouched(interpreter.step(case), case)


def test_empty_tensors_are_counted(interpreter):
    case = make_case("adam", [(0, 3), (0,)])
    assert [t.item() for t in interpreter.step(case).lists["steps"]] == [4, 4]


def test_what_changes_between_steps_takes_effect(interpreter):
    """A step follows in-place changes of map and hyper, changes of first, flags and gradient, and changes back."""
    decay_map = LOCO_2D.clone()
    case = make_case("sgd", [(6, 5, 3, 3), (9,)], maps=[decay_map], map_index=[0, -1], first=[1, 1])
    again = replace(case, options={**case.options, "first": []})
    other = replace(again, lists={**case.lists, "grads": [torch.randn_like(g) for g in case.lists["grads"]]})
    squared = [(decay_map, LOCO_2D.square()), (case.hyper, case.hyper * 0.5)]
    back = [(decay_map, LOCO_2D), (case.hyper, case.hyper.clone())]
    jobs = [(case, []), (again, []), (again, squared), (other, []), (again, back)]
    expected = saved(jobs)
    stepped = interpreter.steps(*jobs)
    jobs = loaded(expected)
    for each, before in jobs:
        for tensor, values in before:
            tensor.copy_(values)
        each.step("reference")
    assert_same(stepped, jobs[-1][0])
