"""Tests of the Triton step of parameters with a penalty, in Triton's interpreter: the step and the prox after it match
the reference. Learning rates, step counts and found_inf are tensors whose values the host must not read."""

import pytest
import torch

from loco_ext import ops
from tests.covering import covering, slow
from tests.optim_step.cases import FLOATS, Case, assert_untouched, make_case
from tests.optim_step.maps import LOCO_2D
from tests.tolerances import ULPS_OF_ROOTS, assert_within_ulps, same_bits
from tests.triton_runs import needs_triton

pytestmark = needs_triton

RINGS = [0, 0, 0, 0, 2, 1, 0, 1, 1]
SHAPES = [(2, 20, 3, 3), (7,), (1, 2, 3, 3)]
RULES = {
    "sgd": ("sgd", {"states": 0}),
    "momentum": ("sgd", {"nesterov": True, "maps": [LOCO_2D], "map_index": [0, -1, 0]}),
    "adam": ("adam", {"amsgrad": True, "states": 3}),
    "adamw": ("adam", {"decoupled": True, "maps": [LOCO_2D], "map_index": [0, -1, 0]}),
}
MODES = {"l2": {}, "linf": {"linf": True}, "squared": {"squared": 0.2}}


class Unread(torch.Tensor):
    """A number that the host must not read."""

    def item(self):
        raise AssertionError("a number of the device was read")

    __float__ = __bool__ = __int__ = __index__ = tolist = item


def penalty(squared: float = 0.0, linf: bool = False) -> ops.StepPenalty:
    t = torch.tensor([12.0, 16.0, 20.0], dtype=torch.float64) * (3 if linf else 1)
    return ops.StepPenalty(RINGS, t, torch.full_like(t, squared) if squared else None, linf)


def joint(linf: bool = False) -> ops.StepPenalty:
    """Return a joint penalty with one group per kernel: the whole kernel."""
    zero = torch.zeros(1, dtype=torch.float64)
    return ops.StepPenalty([0] * 9, zero, torch.full_like(zero, 0.3), linf, joint=True)


def penalised(rule: str, mode: str = "l2", **options) -> Case:
    name, given = RULES[rule]
    end = penalty(**MODES[mode])
    return make_case(name, SHAPES, **{**given, **options, "penalties": [end, None, end]})


def assert_is_reference(actual: Case, case: Case) -> None:
    expected = case.copy().step("reference")
    for name, tensors in expected.lists.items():
        for i, (a, b) in enumerate(zip(actual.lists[name], tensors, strict=True)):
            scale = case.lists[name][i].double().abs().max()
            if name == "params" and i != 1:
                assert_within_ulps(a, b, max(8, ULPS_OF_ROOTS[a.dtype]) if a.element_size() > 2 else 1, scale=scale)
                assert torch.equal(a == 0, b == 0)
                assert not torch.equal(a, case.params[i])
            elif case.params[i].dtype == torch.float64:
                assert_within_ulps(a, b, scale=scale.clamp(min=4))
            else:
                assert same_bits(a, b), f"{name}[{i}]"


def unread(case: Case) -> Case:
    """Return a copy whose numbers of the device must not be read by the host."""
    copy = case.copy()
    for name in {"found_inf", "grad_scale"} & copy.options.keys():
        copy.options[name] = copy.options[name].as_subclass(Unread)
    copy.options["lrs"] = [lr.as_subclass(Unread) for lr in case.options.get("lrs", [])]
    if "steps" in copy.lists:
        copy.lists["steps"] = [step.as_subclass(Unread) for step in copy.lists["steps"]]
    return copy


ON_DEVICE = {"found_inf": torch.zeros(()), "grad_scale": torch.tensor(2.0), "lrs": [torch.tensor(0.03)]}


@pytest.mark.parametrize(
    ("rule", "mode", "dtype", "on_device"),
    [
        *covering(RULES, ["l2", "linf"], FLOATS, [True, False]),
        slow(("adam", "squared", torch.float32, False)),  # nests two searches
    ],
    ids=str,
)
def test_the_step_ends_with_the_references_prox(interpreter, rule, mode, dtype, on_device):
    case = penalised(rule, mode, dtypes=[dtype] * 3, **({**ON_DEVICE, "lr_index": [0]} if on_device else {}))
    done = interpreter.step(unread(case))
    if "steps" in done.lists:
        done.lists["steps"] = [step.as_subclass(torch.Tensor) for step in done.lists["steps"]]
    assert_is_reference(done, case)


@pytest.mark.parametrize(("rule", "linf"), [("momentum", False), slow(("adam", True))])
def test_joint_filters_are_shrunk_without_a_look_at_numbers_of_the_device(interpreter, rule, linf):
    case = make_case(RULES[rule][0], [(2, 1, 3, 3)], lrs=ON_DEVICE["lrs"], lr_index=[0], penalties=[joint(linf)])
    done, expected = interpreter.step(unread(case)), case.copy().step("reference")
    scale = case.params[0].abs().max()
    assert_within_ulps(done.params[0], expected.params[0], ULPS_OF_ROOTS[torch.float32], scale=scale)
    assert not torch.equal(done.params[0], case.params[0])


@pytest.mark.parametrize(("rule", "dtype"), [("sgd", torch.float32), ("adam", torch.bfloat16)], ids=str)
def test_nothing_changes_where_infinity_was_found_and_a_learning_rate_of_0_shrinks_nothing(interpreter, rule, dtype):
    case = penalised(rule, dtypes=[dtype] * 3, found_inf=torch.ones(()))
    assert_untouched(interpreter.step(case), case)
    case = penalised(rule, dtypes=[dtype] * 3, lrs=[torch.tensor(0.0)], lr_index=[0])
    assert all(map(torch.equal, interpreter.step(case).params, case.params))
