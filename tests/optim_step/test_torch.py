"""Tests of how the optimizer step works with torch: AMP, version counters, opcheck, torch.compile."""

import pytest
import torch

from loco_ext import geometry, ops
from tests.optim_step.cases import Case, assert_same, assert_untouched, make_case
from tests.tolerances import same_bits

pytestmark = pytest.mark.usefixtures("kernels")
BOTH = pytest.mark.parametrize("backend", ["native", "reference"])
RULES = pytest.mark.parametrize("rule", ["sgd", "adam"])
LOCO = geometry.decay_map((3, 3), (0.5, 2.0))
SHAPES = [(4, 2, 3, 3), (19,)]
MAPS = {"maps": [LOCO], "map_index": [0, -1]}


@BOTH
@RULES
@pytest.mark.parametrize("found_inf", [1.0, 2.0, 0.5, float("nan")])
def test_nothing_changes_where_infinity_was_found(found_inf, rule, backend):
    found = torch.tensor(found_inf)
    case = make_case(rule, SHAPES, found_inf=found, grad_scale=torch.tensor(8.0), **MAPS)
    before = case.copy()
    assert_untouched(case.step(backend), before)


@BOTH
@RULES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_step_is_made_where_none_was_found(dtype, rule, backend):
    case = make_case(rule, SHAPES, **MAPS)
    expected = case.copy().step(backend)
    assert_same(case.copy(found_inf=torch.zeros(1, dtype=dtype)).step(backend), expected)


@BOTH
@RULES
@pytest.mark.parametrize("scale", [1.0, 3.0, 65536.0, -2.0])
@pytest.mark.parametrize("maximize", [False, True])
def test_gradients_are_divided_by_their_scale_in_memory_too(maximize, scale, rule, backend):
    case = make_case(rule, SHAPES, maximize=maximize, **MAPS)
    expected = case.copy()
    expected.lists["grads"] = [g / scale for g in expected.lists["grads"]]
    case.lists["grads"][0] = case.lists["grads"][0].contiguous(memory_format=torch.channels_last)
    for scale_dtype in (torch.float32, torch.float64):
        scaled = case.copy(grad_scale=torch.tensor([scale], dtype=scale_dtype)).step(backend)
        assert_same(scaled, expected.copy().step(backend))


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_unscaled_gradients_are_rounded_only_in_memory(dtype, backend):
    case = make_case("sgd", SHAPES, dtypes=[torch.float32, dtype, torch.float32])
    exact = case.copy()
    exact.lists["grads"] = [g.float() / 3 for g in case.lists["grads"]]
    scaled = case.copy(grad_scale=torch.tensor(3.0)).step(backend)
    assert all(map(torch.equal, scaled.params, exact.step(backend).params))
    for g, before in zip(scaled.lists["grads"], case.lists["grads"], strict=True):
        assert torch.equal(g, (before.float() / 3).to(dtype))


@BOTH
@RULES
def test_gradients_are_not_written_without_a_scale(rule, backend):
    case = make_case(rule, SHAPES, dtypes=[torch.bfloat16, torch.float32, torch.float32], seed=1, maximize=True)
    before = case.copy()
    case.step(backend)
    assert all(map(same_bits, case.lists["grads"], before.lists["grads"]))


@BOTH
@RULES
def test_versions_of_written_tensors_increase(rule, backend):
    case = make_case(rule, SHAPES, states=3, grad_scale=torch.tensor(2.0), amsgrad=True, **MAPS)
    if rule == "sgd":
        del case.options["amsgrad"]
    constant = [case.hyper, LOCO]
    before = {name: [t._version for t in tensors] for name, tensors in case.lists.items()}
    before_constant = [t._version for t in constant]
    case.step(backend)
    for name, tensors in case.lists.items():
        assert tensors
        assert all(t._version > old for t, old in zip(tensors, before[name], strict=True)), name
    assert [t._version for t in constant] == before_constant


@BOTH
def test_autograd_notices_that_a_saved_weight_was_stepped(backend):
    case = make_case("sgd", [(5,)])
    w = case.params[0].requires_grad_()
    loss = w.square().sum()
    with torch.no_grad():
        case.step(backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kernels", ["cpu"], indirect=True)
@RULES
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"states": 3, "amsgrad": True},
        {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0), **MAPS},
        {"dtypes": [torch.bfloat16] * 3, "seed": 3, **MAPS},
    ],
    ids=["plain", "all_states", "scaled", "rounded"],
)
def test_operators_pass_opcheck(options, rule):
    case = make_case(rule, SHAPES, **options)
    results = torch.library.opcheck(torch.ops.loco_ext.optim_step.default, case.arguments().for_operator())
    assert set(results.values()) == {"SUCCESS"}


@RULES
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("level", ["ops", "torch.ops"])
def test_compiled_call_equals_eager_and_is_compiled_once(level, backend, rule):
    """20 calls, the hyperparameters other numbers each time, in the middle of code that is compiled too."""
    operator = getattr(ops, f"optim_step_{rule}")

    def function(case_lists, gradient_source, hyper):
        lists = {**case_lists, "grads": [t * 2 for t in gradient_source]}
        case = Case(rule, lists, hyper, {"maps": [LOCO], "map_index": [0, -1], "seed": 5, "ordinals": [0, 1]})
        if level == "torch.ops":
            torch.ops.loco_ext.optim_step(*case.arguments().for_operator())
        else:
            operator(*lists.values(), hyper, **case.options)
        return lists["params"][0].float().sum()

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    start = make_case(rule, SHAPES, dtypes=[torch.bfloat16, torch.float32, torch.float32])
    ours, expected = start.copy(), start.copy()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(20):
            grads = [torch.randn(shape) for shape in SHAPES]
            hyper = start.hyper.clone()
            hyper[:, :2] *= 1 + i / 20
            results = [f(case.lists, grads, hyper) for f, case in ((compiled, ours), (function, expected))]
            assert torch.equal(*results)
            assert_same(ours, expected)
    assert not torch.equal(ours.params[0], start.params[0])
    torch._dynamo.reset()
