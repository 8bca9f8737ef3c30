"""Tests of the optimizer step's Triton kernels on any strides, sizes and dtypes, in Triton's interpreter."""

import itertools
import sys

import pytest
import torch

from loco_ext.ops.step_checks import check_step
from loco_ext.reference.rounding import philox
from tests.optim_step.cases import assert_same, assert_untouched, make_case, whole
from tests.optim_step.interpreter import BLOCK, assert_is_reference, far
from tests.optim_step.layouts import KINDS, LAYOUTS
from tests.optim_step.maps import ANY_MAP, LOCO_2D
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
