"""Tests of the landscape's Triton kernels on a GPU: against the reference, without synchronizing, and in CUDA graphs.

``make device-check`` also runs those named ``test_kernels_...`` under compute-sanitizer.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from loco_ext import ops
from tests.gpu import no_syncs, using
from tests.landscape.cases import (
    CASES,
    GRAD,
    MEMORY_OF_FAR,
    ULPS_OF_SUMS,
    assert_is_reference,
    far_gradients,
    make_call,
    run,
)
from tests.tolerances import assert_within_ulps, same_bits


@pytest.fixture(autouse=True, params=["triton"])
def _backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force our Triton kernels."""
    yield from using("landscape", request.param)


EVERY = CASES | {
    "a batch of images": ((64, 3, 96, 96), torch.float32, 3, False),
    "one row, half precision": ((3, 2, 1, 3000), torch.float16, 1, True),
}


def on_gpu(call: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else tensor.cuda() for tensor in call)


def results(g: Tensor, weights: Tensor, stencil: Tensor, target: Tensor | None, *_: object) -> tuple[Tensor, ...]:
    """Return what the operator does, and the gradients of its loss."""
    leaves = g.detach().requires_grad_(), weights.detach().requires_grad_()
    found = ops.landscape(*leaves, stencil, target)
    return found.loss.detach(), found.map, found.laplacian, *torch.autograd.grad(found.loss, leaves)


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert all(same_bits(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_kernels_compute_what_the_reference_does(name, memory_format):
    g, *others = make_call(*EVERY[name])
    gradients, *there = on_gpu((g, *others))
    found = run(gradients.contiguous(memory_format=memory_format), *there)
    assert_is_reference([each.cpu() for each in found], g, *others)


@pytest.mark.parametrize("axis", [2, 3])
def test_rows_and_pixels_that_lie_farther_apart_than_2_to_the_31(axis):
    if torch.cuda.mem_get_info()[0] < 3 * MEMORY_OF_FAR:
        pytest.skip("needs more memory")
    g = far_gradients(axis, torch.empty(MEMORY_OF_FAR, dtype=torch.bfloat16, device="cuda"))
    _, weights, stencil, target, grad = make_call(g.shape, torch.bfloat16, 3, False)
    found = run(g, *on_gpu((weights, stencil, target, grad)))
    assert_is_reference([each.cpu() for each in found], g.cpu(), weights, stencil, target, GRAD)


@pytest.mark.parametrize("name", ["a batch of images", "one row, half precision"])
def test_every_run_gives_the_same_bits(name):
    call = on_gpu(make_call(*EVERY[name]))
    expected, busy = run(*call), torch.randn(2048, 2048, device="cuda")
    for _ in range(5):
        with torch.cuda.stream(torch.cuda.Stream()):
            busy @ busy
        assert_same(run(*call), expected)


@pytest.mark.parametrize("name", ["curvature", "target"])
def test_calls_do_not_wait_for_the_gpu(name):
    call = on_gpu(make_call(*EVERY[name]))
    expected = results(*call)  # compiles
    with no_syncs():
        found = results(*call)
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["curvature", "target"])
def test_a_graph_repeats_what_it_has_recorded(name):
    call = on_gpu(make_call(*EVERY[name]))
    results(*call)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(*call)
    for _ in range(3):
        call[0].normal_()
        graph.replay()
        assert_same(found, results(*call))


def test_a_loss_compiles_into_one_graph():
    def loss(g: Tensor) -> Tensor:
        return ops.landscape(g * 2).loss

    g = torch.randn(2, 3, 6, 6)
    there = g.cuda().requires_grad_()
    found = torch.compile(loss, fullgraph=True, backend="aot_eager")(there)
    g.requires_grad_()
    pairs = [(found, loss(g)), (torch.autograd.grad(found, there)[0], torch.autograd.grad(loss(g), g)[0])]
    for actual, expected in pairs:
        assert_within_ulps(actual.detach().cpu(), expected, ULPS_OF_SUMS, scale=expected.detach().abs().max())
