"""Tests of the optimizer step on tensors of any strides and dtypes, in any mix."""

import itertools
import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from tests.covering import covering
from tests.optim_step.cases import (
    FLOATS,
    Case,
    Layout,
    assert_native_is_reference,
    assert_same,
    make_case,
    with_all,
    with_interpreter,
)
from tests.optim_step.layouts import GUARD, KINDS, LAYOUTS, gaps, permuted
from tests.optim_step.maps import LOCO_2D
from tests.tolerances import same_bits

pytestmark = pytest.mark.usefixtures("kernels")

MAPS = {"maps": [LOCO_2D], "map_index": [0]}


def check_layouts(case: Case, choices: Iterable[dict[str, Layout]]) -> None:
    """Step in each choice of layouts: values equal those of contiguous tensors, strides and gaps stay unchanged."""
    expected = case.copy().step()
    for layouts in choices:
        laid_out = case.laid_out(**layouts)
        strides = {name: [t.stride() for t in tensors] for name, tensors in laid_out.lists.items()}
        before = {name: [gaps(t) for t in tensors] for name, tensors in laid_out.lists.items()}
        laid_out.step()
        assert_same(laid_out, expected)
        for name, tensors in laid_out.lists.items():
            assert [t.stride() for t in tensors] == strides[name]
            for tensor, gap in zip(tensors, before[name], strict=True):
                assert same_bits(gaps(tensor), gap), f"{name}: memory outside the view was written"


@with_all
@pytest.mark.parametrize("kind", KINDS)
def test_any_mix_of_layouts_gives_the_same_bits(kind):
    """Any two layouts meet in any two of the lists, and each layout of a list meets each kind."""
    layouts, number, choices = list(LAYOUTS.values()), list(KINDS).index(kind), []
    for i, j in itertools.product(range(len(layouts)), repeat=2):
        if (i + 2 * j) % len(KINDS) == number:
            state = layouts[(i + j) % len(layouts)]
            choices.append({"params": layouts[i], "grads": layouts[j], "momentum_buffers": state})
    check_layouts(make_case("sgd", [(6, 5, 3, 3)], **MAPS, **KINDS[kind]), choices)


@with_all
@pytest.mark.parametrize("kind", ["float64", "half", "rounded"])
def test_any_layouts_of_adams_states_give_the_same_bits(kind):
    case = make_case("adam", [(6, 5, 3, 3)], states=3, amsgrad=True, **MAPS, **KINDS[kind])
    names = ["params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"]
    layouts = list(LAYOUTS.values())
    count = len(layouts)
    check_layouts(
        case, [{name: layouts[(shift + 3 * k) % count] for k, name in enumerate(names)} for shift in range(count)]
    )


def odd_strides_of_size_1(tensor: Tensor) -> Tensor:
    place = torch.full((500,), GUARD, dtype=tensor.dtype)
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.insert(0, 173 if size == 1 else step)
        step *= size
    return place.as_strided(tensor.shape, strides, 3).copy_(tensor)


OTHER_SHAPES = {
    "0_dim": ((), lambda t: torch.full((5,), GUARD, dtype=t.dtype)[2].copy_(t)),
    "single": ((1, 1, 1, 1), odd_strides_of_size_1),
    "size_1_inside": ((4, 1, 3, 1), odd_strides_of_size_1),
    "vector_with_gaps": ((37,), lambda t: torch.full((111,), GUARD, dtype=t.dtype)[1::3].copy_(t)),
    "empty": ((0, 3, 3, 3), lambda t: t.contiguous(memory_format=torch.channels_last)),
    "empty_inside": ((4, 0, 3), lambda t: t.transpose(0, 2).contiguous().transpose(0, 2)),
    "channels_last_3d": ((4, 3, 3, 3, 3), lambda t: t.contiguous(memory_format=torch.channels_last_3d)),
    "long_rows_with_gaps": ((3, 2500), lambda t: torch.full((3, 2600), GUARD, dtype=t.dtype)[:, 50:-50].copy_(t)),
    "long_columns": ((2500, 3), lambda t: permuted(t, [1, 0])),
    "64_dims": ((2,) * 4 + (1,) * 56 + (3,) * 4, lambda t: t.transpose(0, 63).contiguous().transpose(0, 63)),
}


@with_interpreter
@pytest.mark.parametrize("which", OTHER_SHAPES)
def test_other_shapes_step_in_any_layout(which):
    shape, layout = OTHER_SHAPES[which]
    for dtype, seed in ((torch.float32, None), (torch.bfloat16, 3)):
        case = make_case("sgd", [shape], dtypes=[dtype] * 3, seed=seed)
        assert_native_is_reference(case)
        names = (["params"], ["grads"], ["params", "momentum_buffers"])
        check_layouts(case, [dict.fromkeys(chosen, layout) for chosen in names])


@with_all
def test_expanded_and_shared_gradients_are_read():
    case = make_case("sgd", [(4, 3, 3, 3)] * 3)
    expected = case.copy()
    row = torch.randn(3, 1, 3)
    expected.lists["grads"] = [row.expand(4, 3, 3, 3).contiguous() for _ in range(3)]
    case.lists["grads"] = [row.expand(4, 3, 3, 3)] * 3
    assert all(map(torch.equal, case.step().params, expected.step().params))


@with_interpreter
@pytest.mark.parametrize(("param", "grad", "state"), covering(FLOATS, FLOATS, FLOATS))
def test_any_mix_of_dtypes_gives_the_references_bits(param, grad, state):
    shapes = [(6, 5, 3, 3), (29,), ()]
    maps = {"maps": [LOCO_2D], "map_index": [0, -1, -1]}
    assert_native_is_reference(make_case("sgd", shapes, dtypes=[param, grad, state], **maps))
    adam = make_case("adam", shapes, dtypes=[param, grad, state], states=3, amsgrad=True, decoupled=True, **maps)
    assert_native_is_reference(adam)


@with_interpreter
def test_dtypes_may_differ_from_parameter_to_parameter_and_state_to_state():
    case = make_case("adam", [(6, 5, 3, 3)] * 4, states=3, amsgrad=True, maps=[LOCO_2D], map_index=[0] * 4)
    for k, name in enumerate(["params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"]):
        case.lists[name] = [t.to(FLOATS[(i + k) % 4]) for i, t in enumerate(case.lists[name])]
    assert_native_is_reference(case)


SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 1e-45, 3e38, -3e38, 1.0, -2.0, 6e-8, 65504.0]
SPECIAL_RULES = {
    "sgd": {},
    "sgd_l1": {"l1": True},
    # Without decay, infinite weights stay out of the gradient, and zeros keep their signs.
    "sgd_plain": {"states": 0, "maximize": True, "hyper": (0.05, 0.0, 0.0, 0.0)},
    "adam": {},
    "adamw": {"decoupled": True},
    "amsgrad": {"amsgrad": True},
}


@with_interpreter
@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        *itertools.product(SPECIAL_RULES, [torch.float32, torch.float64]),
        *(("sgd", torch.bfloat16), ("amsgrad", torch.float16)),  # these are computed in float32, too
    ],
    ids=str,
)
def test_nan_infinity_subnormals_and_negative_zero_come_through(rule, dtype):
    """Every pair of special values is used as weight and gradient, gradient and state, and state and weight."""
    first, second = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)), dtype=torch.float64).unbind(1)
    options = {"states": 3, **SPECIAL_RULES[rule]}
    for shift in range(3):
        case = make_case("sgd" if rule.startswith("sgd") else "adam", [first.shape], dtypes=[dtype] * 3, **options)
        names = [name for name in case.lists if name != "steps" and case.lists[name]]
        case.lists[names[shift % len(names)]] = [first.to(dtype)]
        case.lists[names[(shift + 1) % len(names)]] = [second.to(dtype)]
        native, reference = case.copy().step("native"), case.copy().step("reference")
        for name in names:
            (a,), (b,) = native.lists[name], reference.lists[name]
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(a.isinf(), b.isinf())
            assert dtype == torch.float64 or same_bits(a, b), name
            assert torch.equal(a[a == 0].signbit(), b[a == 0].signbit())
            assert a.isfinite().any()
