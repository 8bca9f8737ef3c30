"""Tests of how the optimizer step works with torch: AMP, version counters, opcheck, torch.compile."""

import math

import pytest
import torch

from loco_ext import ops
from tests.covering import covering, slow
from tests.optim_step.cases import (
    Case,
    assert_same,
    assert_untouched,
    make_case,
    with_all,
    with_kernels,
    with_reference,
)
from tests.optim_step.maps import LOCO_2D
from tests.tolerances import same_bits

pytestmark = pytest.mark.usefixtures("kernels")
RULES = pytest.mark.parametrize("rule", ["sgd", "adam"])
SHAPES = [(4, 2, 3, 3), (3000,)]
MAPS = {"maps": [LOCO_2D], "map_index": [0, -1]}


@with_all
@RULES
@pytest.mark.parametrize("found", [torch.tensor(0.5), torch.tensor([math.nan], dtype=torch.float64)], ids=str)
def test_nothing_changes_where_infinity_was_found(found, rule):
    case = make_case(rule, SHAPES, found_inf=found, grad_scale=torch.tensor(8.0), **MAPS)
    before = case.copy()
    assert_untouched(case.step(), before)


@with_all
@RULES
@pytest.mark.parametrize(
    ("scale", "maximize", "dtype"),
    covering([3.0, 65536.0, -2.0], [False, True], [torch.float32, torch.float64], strength=1),
)
def test_gradients_are_divided_by_their_scale_in_memory_too(scale, maximize, dtype, rule):
    case = make_case(rule, SHAPES, maximize=maximize, **MAPS)
    expected = case.copy()
    expected.lists["grads"] = [g / scale for g in expected.lists["grads"]]
    case.lists["grads"][0] = case.lists["grads"][0].contiguous(memory_format=torch.channels_last)
    case.options |= {"grad_scale": torch.tensor([scale], dtype=dtype), "found_inf": torch.zeros((), dtype=dtype)}
    assert_same(case.step(), expected.step())


@with_all
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_unscaled_gradients_are_rounded_only_in_memory(dtype):
    case = make_case("sgd", SHAPES, dtypes=[torch.float32, dtype, torch.float32])
    exact = case.copy()
    exact.lists["grads"] = [g.float() / 3 for g in case.lists["grads"]]
    scaled = case.copy(grad_scale=torch.tensor(3.0)).step()
    assert all(map(torch.equal, scaled.params, exact.step().params))
    for g, before in zip(scaled.lists["grads"], case.lists["grads"], strict=True):
        assert torch.equal(g, (before.float() / 3).to(dtype))


@with_reference
@RULES
@pytest.mark.parametrize("scaled", [False, True])
def test_only_what_is_written_has_a_higher_version(scaled, rule):
    options = {"grad_scale": torch.tensor(2.0)} if scaled else {"maximize": True}
    options |= {"amsgrad": True} if rule == "adam" else {}
    case = make_case(rule, SHAPES, states=3, **options, **MAPS)
    constant = [case.hyper, LOCO_2D, *(() if scaled else case.lists["grads"])]
    kept = [(t, t._version, t.clone()) for t in constant]
    written = [t for name, ts in case.lists.items() for t in ts if scaled or name != "grads"]
    before = [t._version for t in written]
    case.step()
    assert all(t._version > old for t, old in zip(written, before, strict=True))
    assert all(t._version == old and same_bits(t, values) for t, old, values in kept)


@with_kernels("cpu")
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("sgd", {"dtypes": [torch.bfloat16] * 3, "seed": 3, **MAPS}),
        *map(slow, [("sgd", {"states": 0}), ("adam", {"states": 3, "amsgrad": True})]),
        slow(("adam", {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0), **MAPS})),
    ],
    ids=["rounded", "no_states", "all_states", "scaled"],
)
def test_operators_pass_opcheck(rule, options):
    case = make_case(rule, SHAPES, **options)
    results = torch.library.opcheck(torch.ops.loco_ext.optim_step.default, case.arguments().for_operator())
    assert set(results.values()) == {"SUCCESS"}


@with_kernels("cpu")
@pytest.mark.parametrize(
    ("rule", "level", "backend"),
    [
        ("sgd", "ops", "aot_eager"),
        ("adam", "torch.ops", "aot_eager"),
        slow(("sgd", "torch.ops", "inductor")),
        slow(("adam", "ops", "inductor")),
    ],
)
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_call_equals_eager_and_is_compiled_once(rule, level, backend):
    """The hyperparameters are other numbers in each call, in the middle of code that is compiled too."""
    operator = getattr(ops, f"optim_step_{rule}")

    def function(case_lists, gradient_source, hyper):
        lists = {**case_lists, "grads": [t * 2 for t in gradient_source]}
        case = Case(rule, lists, hyper, {**MAPS, "seed": 5, "ordinals": [0, 1]})
        if level == "torch.ops":
            torch.ops.loco_ext.optim_step(*case.arguments().for_operator())
        else:
            operator(*lists.values(), hyper, **case.options)
        return lists["params"][0].float().sum()

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    start = make_case(rule, SHAPES, dtypes=[torch.bfloat16, torch.float32, torch.float32])
    ours, expected = start.copy(), start.copy()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(4):
            grads = [torch.randn(shape) for shape in SHAPES]
            hyper = start.hyper.clone()
            hyper[:, :2] *= 1 + i / 4
            results = [f(case.lists, grads, hyper) for f, case in ((compiled, ours), (function, expected))]
            assert torch.equal(*results)
            assert_same(ours, expected)
    assert not torch.equal(ours.params[0], start.params[0])
