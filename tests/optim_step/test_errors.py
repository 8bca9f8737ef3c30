"""Tests of bad arguments to the optimizer step: a typed error names the argument, and nothing is written."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from loco_ext import ops
from loco_ext.ops.optim_step import run_step
from tests.covering import covering
from tests.optim_step.cases import Case, assert_same, assert_untouched, make_case
from tests.optim_step.maps import LOCO_2D as LOCO

BOTH = pytest.mark.parametrize("backend", ["native", "reference"])
SHAPE = (4, 2, 3, 3)
SHRINKING = [ops.StepPenalty([0] * 9, torch.ones(1, dtype=torch.float64), linf=True)] * 2


def lists(**changes):
    """Return a change that replaces entries of lists: ``lists(grads=(1, lambda t: ...))``."""

    def change(case: Case) -> None:
        for name, (index, function) in changes.items():
            case.lists[name][index] = function(case.lists[name][index])

    return change


def shorter(name):
    return lambda case: case.lists[name].pop()


def options(**given):
    return lambda case: case.options.update(given)


def hyper(function):
    def change(case: Case) -> None:
        case.hyper = function(case.hyper)

    return change


def same(name, index, other, other_index):
    """Return a change that makes one entry share the memory of another."""

    def change(case: Case) -> None:
        case.lists[name][index] = case.lists[other][other_index]

    return change


def views_of_one(*named_views):
    """Return a change that makes entries views of one large tensor."""

    def change(case: Case) -> None:
        base = torch.randn(2000)
        for name, index, view in named_views:
            case.lists[name][index] = view(base).reshape_as(case.lists[name][index])

    return change


def both(first, second):
    return lambda case: (first(case), second(case))


def strided(offset, *strides):
    return lambda base: base.as_strided(SHAPE, strides, offset)


TWO_STEPS = [torch.zeros(()), torch.zeros(2)]
COMMON = {
    "too few gradients": (shorter("grads"), ValueError, "grads"),
    "too few parameters": (shorter("params"), ValueError, "grads|group_index"),
    "too short group_index": (options(group_index=[0]), ValueError, "group_index"),
    "too large group_index": (options(group_index=[0, 1]), ValueError, r"group_index\[1\]"),
    "negative group_index": (options(group_index=[-1, 0]), ValueError, r"group_index\[0\]"),
    "too long map_index": (options(map_index=[0, 0, 0]), ValueError, "map_index"),
    "too large map_index": (options(map_index=[0, 1]), ValueError, r"map_index\[1\]"),
    "negative map_index": (options(map_index=[-2, 0]), ValueError, r"map_index\[0\]"),
    "too short lr_index": (options(lrs=[torch.ones(())], lr_index=[0, 0]), ValueError, "lr_index"),
    "too large lr_index": (options(lrs=[torch.ones(())], lr_index=[1]), ValueError, r"lr_index\[0\]"),
    "learning rate of two elements": (options(lrs=[torch.ones(2)], lr_index=[0]), ValueError, r"lrs\[0\]"),
    "learning rate of another type": (options(lrs=[torch.ones(()).long()], lr_index=[0]), ValueError, "lrs"),
    "gradient of another shape": (lists(grads=(1, lambda t: t[:3])), ValueError, r"grads\[1\].*\(4, 2, 3, 3\)"),
    "gradient of more dimensions": (lists(grads=(1, lambda t: t[None])), ValueError, r"grads\[1\]"),
    "gradient that would broadcast": (lists(grads=(0, lambda t: t[:1])), ValueError, r"grads\[0\]"),
    "integer parameter": (lists(params=(1, torch.Tensor.int)), TypeError, r"params\[1\].*int32"),
    "complex gradient": (lists(grads=(0, lambda t: t.to(torch.complex64))), TypeError, r"grads\[0\].*complex64"),
    "lazily negated parameter": (lists(params=(1, torch._neg_view)), TypeError, r"params\[1\].*its own memory"),
    "lazily negated gradient": (lists(grads=(1, torch._neg_view)), TypeError, r"grads\[1\].*its own memory"),
    "sparse gradient": (lists(grads=(1, torch.Tensor.to_sparse)), TypeError, r"grads\[1\].*sparse"),
    "gradient of another device": (lists(grads=(1, lambda t: t.to("meta"))), TypeError, r"grads\[1\].*meta"),
    "hyper in float32": (hyper(torch.Tensor.float), ValueError, "hyper.*float64"),
    "hyper of one dimension": (hyper(lambda h: h[0]), ValueError, "hyper"),
    "hyper of a column less": (hyper(lambda h: h[:, 1:]), ValueError, "hyper"),
    "map in float32": (options(maps=[LOCO.float()]), TypeError, r"maps\[0\].*float32"),
    "map of another kernel size": (options(maps=[LOCO[:2]]), ValueError, r"maps\[0\].*\(2, 3\)"),
    "map of too many dimensions": (options(maps=[LOCO[None, None, None]]), ValueError, r"maps\[0\]"),
    "parameter as its own gradient": (same("grads", 0, "params", 0), ValueError, r"params\[0\]|grads\[0\]"),
    "parameter given twice": (same("params", 1, "params", 0), ValueError, r"params\[0\]|params\[1\]"),
    "expanded parameter": (lists(params=(1, lambda t: t[:1].expand(SHAPE))), ValueError, r"params\[1\]"),
    "parameter that meets itself": (views_of_one(("params", 1, strided(0, 40, 20, 2, 4))), ValueError, r"params\[1\]"),
    "contiguous parameters that overlap": (
        views_of_one(("params", 0, lambda b: b[:72]), ("params", 1, lambda b: b[71:143])),
        ValueError,
        r"params\[0\]|params\[1\]",
    ),
    "strided parameters that overlap": (
        views_of_one(("params", 0, strided(0, 36, 18, 6, 2)), ("params", 1, strided(1, 54, 27, 9, 3))),
        ValueError,
        r"params\[0\]|params\[1\]",
    ),
    "gradient inside a strided parameter": (
        views_of_one(("params", 0, strided(0, 36, 18, 6, 2)), ("grads", 1, strided(40, 18, 9, 3, 1))),
        ValueError,
        r"params\[0\]|grads\[1\]",
    ),
    "expanded gradient to be unscaled": (
        both(options(grad_scale=torch.tensor(2.0)), lists(grads=(1, lambda t: t[:1].expand(SHAPE)))),
        ValueError,
        r"grads\[1\]",
    ),
    "shared gradient to be unscaled": (
        both(options(grad_scale=torch.tensor(2.0)), same("grads", 1, "grads", 0)),
        ValueError,
        r"grads\[0\]|grads\[1\]",
    ),
    "scale of two elements": (options(grad_scale=torch.ones(2)), ValueError, "grad_scale"),
    "scale of zero": (options(grad_scale=torch.zeros(())), ValueError, "grad_scale"),
    "integer scale": (options(grad_scale=torch.tensor(2)), (TypeError, ValueError), "grad_scale"),
    "found_inf of two elements": (options(found_inf=torch.zeros(2)), ValueError, "found_inf"),
    "too few ordinals": (options(seed=1, ordinals=[0]), ValueError, "ordinals"),
}
SGD = {
    "too few buffers": (shorter("momentum_buffers"), ValueError, "momentum_buffers"),
    "too short first": (options(first=[1]), ValueError, "first"),
    "first without buffers": (
        both(lambda case: case.lists.update(momentum_buffers=[]), options(first=[1, 1])),
        ValueError,
        "first",
    ),
    "buffer of another shape": (lists(momentum_buffers=(1, lambda t: t[:2])), ValueError, r"momentum_buffers\[1\]"),
    "buffer for two parameters": (same("momentum_buffers", 0, "momentum_buffers", 1), ValueError, "momentum_buffers"),
    "gradient as buffer": (same("momentum_buffers", 0, "grads", 0), ValueError, r"momentum_buffers\[0\]|grads\[0\]"),
}
ADAM = {
    "no first moments": (lambda case: case.lists.update(exp_avgs=[]), ValueError, "exp_avgs"),
    "too few second moments": (shorter("exp_avg_sqs"), ValueError, "exp_avg_sqs"),
    "no largest second moments": (options(amsgrad=True), ValueError, "max_exp_avg_sqs"),
    "too few steps": (shorter("steps"), ValueError, "steps"),
    "step of two elements": (lambda case: case.lists.update(steps=TWO_STEPS), ValueError, r"steps\[1\]"),
    "integer step": (lists(steps=(1, torch.Tensor.long)), ValueError, r"steps\[1\].*int64"),
    "one step tensor for two": (same("steps", 1, "steps", 0), ValueError, r"steps\[0\]|steps\[1\]"),
    "one tensor for both moments": (same("exp_avg_sqs", 0, "exp_avgs", 0), ValueError, "exp_avg"),
    "moments that are complex": (lists(exp_avgs=(0, lambda t: t + 1j)), TypeError, r"exp_avgs\[0\].*complex64"),
}
ALL = [(rule, name) for rule, own in (("sgd", SGD), ("adam", ADAM)) for name in (*COMMON, *own)]


@BOTH
@pytest.mark.parametrize("shrinks", [False, True])
@pytest.mark.parametrize(("rule", "name"), ALL)
def test_bad_argument_is_a_typed_error_and_nothing_is_written(rule, name, shrinks, backend):
    """Shrinks: a prox follows the step, which is then that of other tensors where they are wider."""
    change, error, message = {**COMMON, **SGD, **ADAM}[name]
    penalties = {"penalties": SHRINKING} if shrinks else {}
    case = make_case(rule, [SHAPE, SHAPE], maps=[LOCO], map_index=[0, 0], **penalties)
    change(case)
    before = dense_copy(case)
    with pytest.raises(error, match=message) as raised:
        case.step(backend)
    assert not isinstance(raised.value, RuntimeError)
    assert_untouched(dense_only(case), before)


@pytest.mark.parametrize(("dtype", "other"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
@pytest.mark.parametrize("shared", ["by two parameters", "by all elements"])
def test_states_of_another_dtype_are_checked_too_where_a_prox_follows(dtype, other, shared):
    params, grads = ([torch.randn(SHAPE, dtype=dtype) for _ in range(2)] for _ in range(2))
    buffer = torch.zeros(SHAPE, dtype=other) if shared == "by two parameters" else torch.zeros(1, dtype=other)
    buffers = [buffer, buffer] if shared == "by two parameters" else [buffer.expand(SHAPE), torch.zeros(SHAPE)]
    before = [param.clone() for param in params]
    with pytest.raises(ValueError, match="momentum_buffers"):
        ops.optim_step_sgd(params, grads, buffers, torch.tensor([[0.1, 0, 0.9, 0]]).double(), penalties=SHRINKING)
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize(("name", "value"), [("params", None), ("momentum_buffers", None), ("found_inf", 1.0)])
def test_what_is_no_tensor_is_a_typed_error_where_a_prox_follows(name, value):
    given = {each: [torch.randn(SHAPE) for _ in range(2)] for each in ("params", "grads", "momentum_buffers")}
    before = given["params"][0].clone()
    if name in given:
        given[name] = [given[name][0], value]
    hyper, other = torch.tensor([[0.1, 0, 0.9, 0]]).double(), {} if name in given else {name: value}
    with pytest.raises(TypeError, match=name):
        ops.optim_step_sgd(*given.values(), hyper, penalties=SHRINKING, **other)
    assert torch.equal(given["params"][0], before)


def test_penalties_of_another_dtype_are_refused():
    t = torch.ones(2, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"thresholds: expected float64 on the CPU, got torch.float32 on cpu"):
        ops.StepPenalty([0, 1, 0], t.float())
    with pytest.raises(TypeError, match=r"squared: expected float64"):
        ops.StepPenalty([0, 1, 0], t, t.half())


def test_more_penalties_than_parameters_are_refused():
    weight, hyper = torch.ones(3, 2, 3), torch.tensor([[0.1, 0, 0, 0]]).double()
    penalty = ops.StepPenalty([0, 1, 0], torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="penalties: expected 1 entries"):
        ops.optim_step_sgd([weight], [torch.ones_like(weight)], [], hyper, penalties=[penalty] * 2)
    assert (weight == 1).all()


def dense_only(case: Case) -> Case:
    kept = {name: [t for t in ts if not t.is_sparse and t.is_cpu] for name, ts in case.lists.items()}
    return Case(case.rule, kept, case.hyper, case.options)


def dense_copy(case: Case) -> Case:
    return dense_only(case).copy()


SEPARATE = {
    "odd and even elements": (strided(0, 36, 18, 6, 2), strided(1, 36, 18, 6, 2)),
    "alternating rows": (strided(0, 36, 18, 6, 1), strided(3, 36, 18, 6, 1)),
    "alternating channels": (strided(0, 36, 9, 3, 1), strided(18, 36, 9, 3, 1)),
    "one after the other": (strided(0, 18, 9, 3, 1), strided(72, 18, 9, 3, 1)),
    "a dense one between": (strided(0, 400, 9, 3, 1), strided(100, 18, 9, 3, 1)),
    "crossing strides": (strided(0, 40, 20, 2, 3), strided(11, 40, 20, 2, 3)),
}


@BOTH
@pytest.mark.parametrize(
    ("name", "where"),
    covering(SEPARATE, [("params", "grads"), ("params", "params"), ("momentum_buffers", "params")], strength=1),
)
def test_interleaved_views_that_do_not_overlap_are_stepped(name, where, backend):
    case = make_case("sgd", [SHAPE, SHAPE])
    base = torch.randn(2000)
    for index, list_name, view in zip((0, 1), where, SEPARATE[name], strict=True):
        case.lists[list_name][index] = view(base)
    expected = Case("sgd", {name: [t.clone() for t in ts] for name, ts in case.lists.items()}, case.hyper)
    assert_same(case.step(backend), expected.step(backend))


@BOTH
def test_hyperparameters_may_be_a_view(backend):
    case = make_case("sgd", [SHAPE])
    expected = case.copy().step(backend)
    case.hyper = torch.stack([case.hyper, torch.zeros_like(case.hyper)], -1)[..., 0]
    assert_same(case.step(backend), expected)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([4, 4, 2, 3, 3], None),
        ([4, 4, 2, 3, 1], r"params\[0\]: expected the shape given in shapes, got \(4, 2, 3, 3\)"),
        ([4, 4, 2, 3], r"params\[0\]: expected the shape given in shapes"),
        ([], r"params\[0\]: expected the shape given in shapes"),
        ([4, 4, 2, 3, 3, 1, 5], "shapes: expected 5 numbers, got 7"),
        ([[4, 4, 2, 3, 3]], "shapes: expected a contiguous float64 tensor of one dimension"),
    ],
)
def test_operator_refuses_parameters_of_other_shapes_than_expected(shapes, message):
    case = make_case("sgd", [SHAPE])
    arguments = replace(case.arguments(), shapes=torch.tensor(shapes, dtype=torch.float64))
    before = case.params[0].clone()
    with pytest.raises(RuntimeError, match=message) if message else nullcontext():
        torch.ops.loco_ext.optim_step(*arguments.for_operator())
    assert torch.equal(case.params[0], before) == bool(message)
    with pytest.raises(ValueError, match="shapes") if message else nullcontext():
        run_step(arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table[:-1], "of a number of taps"),
        (lambda table: table[:0], "of a number of taps"),
        (lambda table: table.float(), "of a number of taps"),
        (lambda table: table.index_fill(0, torch.tensor([0]), torch.nan), "of a number of taps"),
        (lambda table: table.index_fill(0, torch.tensor([0]), 1e300), "of a number of taps"),
        (lambda table: table.index_fill(0, torch.tensor([3]), 2.0), "expected rings from 0 to 1, got 2"),
        (lambda table: table.index_fill(0, torch.tensor([3]), torch.nan), "expected rings from 0 to 1, got nan"),
        (lambda table: torch.cat([torch.tensor([8.0]), table[2:]]).double(), "filters of 8 taps"),
    ],
)
def test_operator_refuses_penalties_that_it_cannot_read(change, message):
    case = make_case("sgd", [SHAPE])
    penalty = ops.StepPenalty([0, 1, 1] * 3, torch.ones(2, dtype=torch.float64))
    penalty.table = change(penalty.table)
    arguments = replace(case.arguments(), penalties=[penalty])
    with pytest.raises(RuntimeError, match=rf"penalties\[0\].*{message}"):
        torch.ops.loco_ext.optim_step(*arguments.for_operator())


@pytest.mark.parametrize(
    ("rule", "name"), [("sgd", "steps"), ("sgd", "amsgrad"), ("adam", "first"), ("adam", "shapes")]
)
def test_operators_refuse_keywords_that_are_not_theirs(rule, name):
    operator, lists = (ops.optim_step_sgd, 3) if rule == "sgd" else (ops.optim_step_adam, 6)
    with pytest.raises(TypeError, match=rf"optim_step_{rule}\(\) got an unexpected keyword argument '{name}'"):
        operator(*[[]] * lists, torch.zeros(1, 4), **{name: [1]})
