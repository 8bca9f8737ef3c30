"""Tests that the optimizer step's Triton kernels give the reference's bits, in Triton's interpreter."""

import itertools
import math
from dataclasses import replace
from decimal import Context, Decimal

import pytest
import torch

from tests.covering import covering
from tests.optim_step.cases import Case, assert_same, assert_untouched, make_case
from tests.optim_step.interpreter import assert_is_reference, scalars
from tests.optim_step.test_step import ADAM_DECAYS, ANY_MAP, DECAYS, FLOATS, LOCO_2D, MAPS, MOMENTUM, SHAPES, hyper_with
from tests.tolerances import same_bits
from tests.triton_runs import loaded, needs_triton, saved

pytestmark = needs_triton


def sgd_case(momentum: str, decay: str, nesterov: bool, maximize: bool, dtype: torch.dtype) -> Case:
    options = {**MOMENTUM[momentum], **DECAYS[decay]}
    hyper = hyper_with("sgd", options.pop("decay", None), dampening=0.0 if nesterov else 0.1)
    return make_case("sgd", SHAPES, dtypes=[dtype] * 3, hyper=hyper, nesterov=nesterov, maximize=maximize, **options)


def adam_case(beta1: float, decay: str, amsgrad: bool, maximize: bool, dtype: torch.dtype) -> Case:
    options = dict(ADAM_DECAYS[decay])
    hyper = hyper_with("adam", options.pop("decay", None), beta1=beta1)
    options |= {"states": 3 if amsgrad else 2, "amsgrad": amsgrad, "maximize": maximize}
    return make_case("adam", SHAPES, dtypes=[dtype] * 3, hyper=hyper, **options)


# Every momentum (or beta1) is combined with every decay; the other options take turns.
SGD = [
    (momentum, decay, i % 2 == 1, i % 3 == 1, FLOATS[i % 4])
    for i, (momentum, decay) in enumerate(itertools.product(MOMENTUM, DECAYS))
]
ADAM = [
    (beta1, decay, i % 2 == 1, i % 3 == 1, FLOATS[i % 4])
    for i, (beta1, decay) in enumerate(itertools.product([0.9, 0.4, 0.0], ADAM_DECAYS))
]


@pytest.mark.parametrize("which", SGD, ids=str)
def test_sgd_gives_the_references_bits(interpreter, which):
    assert_is_reference(interpreter, sgd_case(*which))


@pytest.mark.parametrize("which", ADAM, ids=str)
def test_adam_gives_the_references_bits(interpreter, which):
    assert_is_reference(interpreter, adam_case(*which))


@pytest.mark.slow
def test_any_three_options_together_give_the_references_bits(interpreter):
    for which in covering(MOMENTUM, DECAYS, [False, True], [False, True], FLOATS, strength=3):
        assert_is_reference(interpreter, sgd_case(*which.values))
    for which in covering([0.9, 0.4, 0.0], ADAM_DECAYS, [False, True], [False, True], FLOATS, strength=3):
        assert_is_reference(interpreter, adam_case(*which.values))


@pytest.mark.parametrize("step", [0, 1, 999, 10**6])
def test_adam_gives_the_references_bits_early_and_late(interpreter, step):
    assert_is_reference(interpreter, make_case("adam", SHAPES, step=step, **MAPS))


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


def test_each_group_and_parameter_has_its_own_hyperparameters_map_first_and_step(interpreter):
    case = make_case("sgd", SHAPES[:3] * 2, group_index=[0, 1, 2, 2, 1, 0], first=[0, 1, 0, 1, 0, 1])
    case.hyper = torch.tensor([[0.1, 0.2, 0.9, 0.0], [0.3, 0.0, 0.5, 0.5], [0.01, 0.5, 0.0, 0.2]], dtype=torch.float64)
    case.options |= {"maps": [LOCO_2D, LOCO_2D.square()], "map_index": [1, -1, -1, 0, -1, -1]}
    assert_is_reference(interpreter, case)
    case = make_case("adam", SHAPES[:3] * 2, group_index=[0, 1, 1, 0, 1, 0])
    case.hyper = torch.tensor([[0.1, 0.2, 0.9, 0.99, 1e-8], [0.3, 0.0, 0.5, 0.9, 1e-3]], dtype=torch.float64)
    case.lists["steps"] = [torch.tensor(7.0 * i, dtype=(torch.float32, torch.float64)[i % 2]) for i in range(6)]
    assert_is_reference(interpreter, case)


@pytest.mark.parametrize("rule", ["sgd", "adam", "adamw"])
def test_learning_rates_are_read_from_memory(interpreter, rule):
    options = {"decoupled": True} if rule == "adamw" else {}
    case = make_case(rule[:4], SHAPES[:4], group_index=[0, 1, 2, 1], **options)
    case.hyper = case.hyper.repeat(3, 1)
    lrs = [torch.tensor(0.03), torch.tensor([0.07], dtype=torch.float64)]
    expected = case.copy()
    expected.hyper = case.hyper.clone()
    expected.hyper[0, 0], expected.hyper[2, 0] = lrs[1].item(), lrs[0].item()
    case.options |= {"lrs": lrs, "lr_index": [1, -1, 0]}
    assert_same(interpreter.step(case), expected.step("reference"))
    for option, value in ("lr_index", [1, 1, 0]), ("lrs", [lrs[0], lrs[0].double()]):
        other = interpreter.step(case.copy(**{option: value}))
        assert any(not same_bits(a, b) for a, b in zip(other.params, expected.params, strict=True))


@pytest.mark.parametrize("which", ANY_MAP)
def test_any_map_gives_the_references_bits(interpreter, which):
    shape, decay_map = ANY_MAP[which]
    last = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    for rule, dtype, memory_format in (("sgd", torch.float32, torch.contiguous_format), ("adam", torch.bfloat16, last)):
        options = {"decoupled": True} if rule == "adam" else {}
        case = make_case(rule, [(5,), shape], dtypes=[dtype] * 3, maps=[decay_map], map_index=[-1, 0], **options)
        case.params[1] = case.params[1].contiguous(memory_format=memory_format)
        assert_is_reference(interpreter, case)


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
