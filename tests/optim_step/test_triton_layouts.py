"""Tests of the optimizer step's Triton kernels on any strides, sizes and dtypes, in Triton's interpreter."""

import itertools
import sys

import pytest
import torch

from loco_ext.ops.step_checks import check_step
from loco_ext.reference.rounding import philox
from tests.optim_step.cases import Case, assert_same, assert_untouched, make_case, whole
from tests.optim_step.interpreter import BLOCK, Interpreter, assert_is_reference, assert_same_as, far
from tests.optim_step.test_layouts import KINDS, LAYOUTS, OTHER_SHAPES, SPECIAL, gaps
from tests.optim_step.test_step import ANY_MAP, FLOATS, LOCO_2D
from tests.tolerances import same_bits
from tests.triton_runs import needs_triton

pytestmark = needs_triton

GUARD = 77.0
NARROW = 2**31 - BLOCK  # most elements whose indices fit into 32 bits


def guarded(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a contiguous copy with GUARD before and behind it."""
    memory = torch.full((tensor.numel() + 2 * offset,), GUARD, dtype=tensor.dtype)
    return memory[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_tensors_of_one_or_more_blocks_give_the_references_bits(interpreter, dtype):
    sizes = [k * BLOCK + extra for k in (1, 2) for extra in (-1, 0, 1)]
    shapes = [*((size,) for size in sizes), (40, 30, 3, 3), (9, 7), (20, 11, 5, 5)]
    options = {"maps": [LOCO_2D, ANY_MAP["5x5"][1]], "map_index": [-1] * len(sizes) + [0, -1, 1], "seed": 3}
    case = make_case("sgd", shapes, dtypes=[dtype] * 3, **options)
    expected = case.copy().step("reference")
    for name, tensors in case.lists.items():  # every second tensor can be accessed in vectors
        case.lists[name] = [guarded(t, (8, 1)[i % 2]) for i, t in enumerate(tensors)]
    actual = interpreter.step(case)
    assert_same(actual, expected)
    for tensor in itertools.chain(*actual.lists.values()):
        offset = tensor.storage_offset()
        memory = whole(tensor)
        assert (torch.cat([memory[:offset], memory[-offset:]]) == GUARD).all()


def laid_out(interpreter: Interpreter, case: Case, **layouts) -> None:
    """Step the case in the given layouts: values equal those of contiguous tensors, strides and gaps stay unchanged."""
    expected = case.copy().step("reference")
    given = case.laid_out(**layouts)
    stepped = interpreter.step(given)
    assert_same_as(stepped, expected)
    for name, tensors in stepped.lists.items():
        for tensor, before in zip(tensors, given.lists[name], strict=True):
            assert tensor.stride() == before.stride()
            assert same_bits(gaps(tensor), gaps(before)), f"{name}: memory outside the view was written"


@pytest.mark.parametrize("param", LAYOUTS)
def test_any_mix_of_layouts_gives_the_references_bits(interpreter, param):
    layouts, kinds = list(LAYOUTS.values()), itertools.cycle(KINDS.values())
    for shift, grad in enumerate(layouts):
        kind = dict(next(kinds))
        case = make_case("sgd", [(6, 5, 3, 3)], maps=[LOCO_2D], map_index=[0], **kind)
        state = layouts[(3 * shift + 1) % len(layouts)]
        laid_out(interpreter, case, params=LAYOUTS[param], grads=grad, momentum_buffers=state)


@pytest.mark.parametrize("kind", KINDS)
def test_any_layouts_of_adams_states_give_the_references_bits(interpreter, kind):
    case = make_case("adam", [(6, 5, 3, 3)], states=3, amsgrad=True, maps=[LOCO_2D], map_index=[0], **KINDS[kind])
    names = ["params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"]
    layouts = list(LAYOUTS.values())
    for shift in (1, 4):
        chosen = {name: layouts[(shift + 2 * k) % len(layouts)] for k, name in enumerate(names)}
        laid_out(interpreter, case, **chosen)


@pytest.mark.parametrize("which", OTHER_SHAPES)
def test_other_shapes_step_in_any_layout(interpreter, which):
    shape, layout = OTHER_SHAPES[which]
    case = make_case("sgd", [shape], dtypes=[torch.bfloat16] * 3, seed=3)
    for names in (["params"], ["grads"], ["params", "momentum_buffers"]):
        laid_out(interpreter, case, **dict.fromkeys(names, layout))


@pytest.mark.parametrize("kind", KINDS)
def test_elements_numbered_in_64_bits_give_the_references_bits(interpreter, kind):
    case = make_case("sgd", [(6, 5, 3, 3), (70, 11, 3, 3)], maps=[LOCO_2D], map_index=[0, 0], **KINDS[kind])
    case.params[1] = LAYOUTS["taps_slowest"](case.params[1])
    assert_is_reference(interpreter, case, wide=True)


@pytest.mark.skipif(sys.platform != "linux" or sys.maxsize < 2**32, reason="needs Linux's mmap and 64 bits")
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize(
    ("numel", "wide"),
    [(NARROW - 1, False), (NARROW, False), (NARROW + 1, True), (2**32 + 100, True)],
)
def test_elements_beyond_2_to_the_31_are_stepped(interpreter, numel, wide, stride):
    w, g = map(torch.from_numpy, interpreter.pool.submit(far, numel, stride, wide).result())
    elements = torch.arange(numel - len(w), numel)
    bits = (1 - 0.25 * g).view(torch.int32)
    random = philox(elements, seed=5, tensor=0, step=3)[0]
    rounded = (bits + (random & 0xFFFF).to(torch.int32)) & ~0xFFFF
    assert same_bits(w, rounded.view(torch.float32))


@pytest.mark.parametrize(
    "dtypes",
    [
        pytest.param(c, marks=[] if i % 7 == 0 else pytest.mark.slow, id="-".join(str(d)[6:] for d in c))
        for i, c in enumerate(itertools.product(FLOATS, FLOATS, FLOATS))
    ],
)
def test_any_mix_of_dtypes_gives_the_references_bits(interpreter, dtypes):
    shapes = [(6, 5, 3, 3), (29,), ()]
    maps = {"maps": [LOCO_2D], "map_index": [0, -1, -1]}
    assert_is_reference(interpreter, make_case("sgd", shapes, dtypes=dtypes, **maps))
    adam = make_case("adam", shapes, dtypes=dtypes, states=3, amsgrad=True, decoupled=True, seed=7, **maps)
    assert_is_reference(interpreter, adam)


def test_dtypes_may_differ_from_parameter_to_parameter_and_state_to_state(interpreter):
    case = make_case("adam", [(6, 5, 3, 3)] * 4, states=3, amsgrad=True, maps=[LOCO_2D], map_index=[0] * 4)
    for k, name in enumerate(["params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"]):
        case.lists[name] = [t.to(FLOATS[(i + k) % 4]) for i, t in enumerate(case.lists[name])]
    assert_is_reference(interpreter, case)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rule", ["sgd", "sgd_l1", "sgd_plain", "adam", "adamw", "amsgrad"])
def test_nan_infinity_subnormals_and_negative_zero_come_through(interpreter, rule, dtype):
    """Every pair of special values is used as weight and gradient, gradient and state, and state and weight."""
    flags = {"sgd_l1": {"l1": True}, "adamw": {"decoupled": True}, "amsgrad": {"amsgrad": True}}.get(rule, {})
    flags["states"] = 3
    if rule == "sgd_plain":  # no decay: infinite weights stay out of the gradient, zeros keep their signs
        flags = {"states": 0, "maximize": True, "hyper": (0.05, 0.0, 0.0, 0.0)}
    pairs = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)), dtype=torch.float64).unbind(1)
    shapes = [pairs[0].shape] * 3
    case = make_case("sgd" if rule.startswith("sgd") else "adam", shapes, dtypes=[dtype] * 3, **flags)
    names = [name for name in case.lists if name != "steps" and case.lists[name]]
    for shift, name in enumerate(names[:3]):
        case.lists[name][shift] = pairs[0].to(dtype)
        case.lists[names[(shift + 1) % len(names)]][shift] = pairs[1].to(dtype)
    assert_same_as(interpreter.step(case), case.copy().step("reference"))


def test_expanded_gradients_are_read(interpreter):
    case = make_case("sgd", [(4, 3, 3, 3)] * 2)
    case.lists["grads"] = [torch.randn(3, 1, 3).expand(4, 3, 3, 3)] * 2
    assert_is_reference(interpreter, case)


def test_lazily_negated_views_are_refused():
    from loco_ext.triton_kernels import optim_step

    negated = torch.complex(torch.randn(5), torch.randn(5)).conj().imag
    assert negated.is_neg()
    for name in ("params", "grads", "momentum_buffers"):
        case = make_case("sgd", [(3,), (5,)])
        before = case.copy()
        case.lists[name][1] = negated
        with pytest.raises(RuntimeError):
            optim_step.optim_step(case.arguments())
        with pytest.raises(TypeError, match=rf"{name}\[1\]: expected a tensor of its own memory"):
            check_step(case.arguments())
        case.lists[name][1] = before.lists[name][1]
        assert_untouched(case, before)
