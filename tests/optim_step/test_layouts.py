"""Tests of the optimizer step on tensors of any strides and dtypes, in any mix."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from loco_ext import geometry, ops
from tests.covering import covering
from tests.optim_step import cases as optim_step_cases
from tests.optim_step.cases import (
    assert_native_is_reference,
    assert_same,
    make_case,
    with_interpreter,
)
from tests.optim_step.layouts import (
    GUARD,
    KINDS,
    LAYOUTS,
    gaps,
    permuted,
)
from tests.tolerances import same_bits

pytestmark = pytest.mark.usefixtures("kernels")

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LOCO = geometry.decay_map((3, 3), (0.5, 2.0))


def check_layouts(case, **layouts) -> None:
    """Step the case in the given layouts: values equal those of contiguous tensors, strides and gaps stay unchanged."""
    expected = case.copy().step()
    laid_out = case.laid_out(**layouts)
    strides = {name: [t.stride() for t in tensors] for name, tensors in laid_out.lists.items()}
    before = {name: [gaps(t) for t in tensors] for name, tensors in laid_out.lists.items()}
    laid_out.step()
    assert_same(laid_out, expected)
    for name, tensors in laid_out.lists.items():
        assert [t.stride() for t in tensors] == strides[name]
        for tensor, gap in zip(tensors, before[name], strict=True):
            assert same_bits(gaps(tensor), gap), f"{name}: memory outside the view was written"


@with_interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("param", LAYOUTS)
def test_any_mix_of_layouts_gives_the_same_bits(param, kind):
    case = make_case("sgd", [(6, 5, 3, 3)], maps=[LOCO], map_index=[0], **KINDS[kind])
    layouts = list(LAYOUTS.values())
    place = layouts.index(LAYOUTS[param])
    for shift, grad in enumerate(layouts):  # any two of the three meet in all layouts
        state = layouts[(place + shift) % len(layouts)]
        check_layouts(case, params=LAYOUTS[param], grads=grad, momentum_buffers=state)


@with_interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_any_layouts_of_adams_states_give_the_same_bits(kind):
    case = make_case("adam", [(6, 5, 3, 3)], states=3, amsgrad=True, maps=[LOCO], map_index=[0], **KINDS[kind])
    names = ["params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"]
    layouts = list(LAYOUTS.values())
    for shift in range(len(layouts)):
        check_layouts(case, **{name: layouts[(shift + 3 * k) % len(layouts)] for k, name in enumerate(names)})


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("layout", ["channels_last", "transposed", "every_other_tap"])
def test_reference_takes_layouts_as_the_kernels_do(layout, backend):
    case = make_case("adam", [(6, 5, 3, 3)], maps=[LOCO], map_index=[0], decoupled=True)
    expected = case.copy().step(backend)
    assert_same(case.laid_out(params=LAYOUTS[layout]).step(backend), expected)


def odd_strides_of_size_1(tensor: Tensor) -> Tensor:
    place = torch.full((500,), GUARD, dtype=tensor.dtype)
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.insert(0, 173 if size == 1 else step)
        step *= size
    return place.as_strided(tensor.shape, strides, 3).copy_(tensor)


OTHER_SHAPES = {
    "0_dim": ((), lambda t: torch.full((5,), GUARD, dtype=t.dtype)[2].copy_(t)),
    "0_dim_odd_strides": ((), odd_strides_of_size_1),
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", OTHER_SHAPES)
def test_other_shapes_step_in_any_layout(which, dtype):
    shape, layout = OTHER_SHAPES[which]
    case = make_case("sgd", [shape], dtypes=[dtype] * 3, seed=None if dtype == torch.float32 else 3)
    assert_native_is_reference(case)
    for names in (["params"], ["grads"], ["momentum_buffers"], ["params", "momentum_buffers"]):
        check_layouts(case, **dict.fromkeys(names, layout))


@with_interpreter
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_expanded_and_shared_gradients_are_read(backend):
    case = make_case("sgd", [(4, 3, 3, 3)] * 3)
    expected = case.copy()
    row = torch.randn(3, 1, 3)
    expected.lists["grads"] = [row.expand(4, 3, 3, 3).contiguous() for _ in range(3)]
    case.lists["grads"] = [row.expand(4, 3, 3, 3)] * 3
    case.step(backend)
    expected.step(backend)
    assert all(map(torch.equal, case.params, expected.params))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_lazily_negated_gradient_is_read_with_its_sign_or_refused(backend):
    g = torch.complex(torch.randn(5), torch.randn(5)).conj().imag
    assert g.is_neg()
    case = make_case("sgd", [(5,)])
    before, expected = case.copy(), case.copy()
    case.lists["grads"], expected.lists["grads"] = [g], [g.resolve_neg().clone()]
    refused = False
    try:
        case.step(backend)
    except (RuntimeError, TypeError):  # torch refuses before the operator is reached, or ours does
        refused = True
    expected = before if refused else expected.step(backend)
    assert torch.equal(case.params[0], expected.params[0])


@with_interpreter
@pytest.mark.parametrize(("param", "grad", "state"), covering(FLOATS, FLOATS, FLOATS, sweep=True))
def test_any_mix_of_dtypes_gives_the_references_bits(param, grad, state):
    shapes = [(6, 5, 3, 3), (29,), ()]
    maps = {"maps": [LOCO], "map_index": [0, -1, -1]}
    assert_native_is_reference(make_case("sgd", shapes, dtypes=[param, grad, state], **maps))
    adam = make_case("adam", shapes, dtypes=[param, grad, state], states=3, amsgrad=True, decoupled=True, **maps)
    assert_native_is_reference(adam)


@with_interpreter
def test_dtypes_may_differ_from_parameter_to_parameter_and_state_to_state():
    case = make_case("adam", [(6, 5, 3, 3)] * 4, states=3, amsgrad=True, maps=[LOCO], map_index=[0] * 4)
    for k, name in enumerate(["params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"]):
        case.lists[name] = [t.to(FLOATS[(i + k) % 4]) for i, t in enumerate(case.lists[name])]
    assert_native_is_reference(case)


SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 1e-45, 3e38, -3e38, 1.0, -2.0, 6e-8, 65504.0]


@with_interpreter
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rule", ["sgd", "sgd_l1", "sgd_plain", "adam", "adamw", "amsgrad"])
def test_nan_infinity_subnormals_and_negative_zero_come_through(rule, dtype):
    """Every pair of special values is used as weight and gradient, gradient and state, and state and weight."""
    flags = {"sgd_l1": {"l1": True}, "adamw": {"decoupled": True}, "amsgrad": {"amsgrad": True}}.get(rule, {})
    flags["states"] = 3
    if rule == "sgd_plain":  # no decay: infinite weights stay out of the gradient, zeros keep their signs
        flags = {"states": 0, "maximize": True, "hyper": (0.05, 0.0, 0.0, 0.0)}
    first, second = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)), dtype=torch.float64).unbind(1)
    shape = first.shape
    for shift in range(3):
        case = make_case("sgd" if rule.startswith("sgd") else "adam", [shape], dtypes=[dtype] * 3, **flags)
        names = [name for name in case.lists if name != "steps" and case.lists[name]]
        case.lists[names[shift % len(names)]] = [first.to(dtype)]
        case.lists[names[(shift + 1) % len(names)]] = [second.to(dtype)]
        assert_native_is_special(case)


def assert_native_is_special(case) -> None:
    native, reference = case.copy().step("native"), case.copy().step("reference")
    for name, tensors in reference.lists.items():
        a, b = native.lists[name][0] if tensors else None, tensors[0] if tensors else None
        if a is None or name == "steps":
            continue
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.isinf(), b.isinf())
        if a.dtype != torch.float64:
            assert same_bits(a, b), name
        else:
            assert torch.equal(a[a == 0].signbit(), b[a == 0].signbit())
        assert a.isfinite().any()


def test_subnormal_weights_are_stepped_not_flushed():
    w = torch.tensor([1e-40, -3e-45, 0.0])
    ops.optim_step_sgd([w], [torch.tensor([1e-41, 0.0, -4e-44])], [], torch.tensor([[1.0, 0, 0, 0]]).double())
    assert torch.equal(w, torch.tensor([9e-41, -3e-45, 4e-44]))


def test_a_case_is_stepped_on_a_gpu_with_its_strides_and_its_memory(monkeypatch):
    """The helper that moves cases to a GPU, tried on the CPU, also copies results back into views of shared memory."""
    flat = torch.randn(2, 40)
    case = make_case("sgd", [(40,)] * 2)
    case.lists["params"] = [flat[0], flat[1, ::2].as_strided((40,), (1,), 40)]
    expected = case.copy().step()
    monkeypatch.setattr(optim_step_cases, "ELSEWHERE", optim_step_cases.Gpu("cpu", "native"))
    assert_same(case.step(), expected)
    assert case.params[0].data_ptr() == flat.data_ptr()
