"""Tests of the optimizer step's Triton kernels on a GPU: they do not synchronize, and work in CUDA graphs.

Their results are tested in Triton's interpreter, and on a GPU by the tests of the operators.
"""

import importlib.util
from dataclasses import replace

import pytest
import torch

from tests.optim_step.cases import Case, assert_same, make_case
from tests.optim_step.maps import LOCO_2D

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

SHAPES = [(6, 5, 3, 3), (3000,), (7,), (5, 4, 3, 3)]


def new_case(rule: str, **options) -> Case:
    options |= {"map_index": [0, -1, -1, 0], "maps": [LOCO_2D], "group_index": [0, 1, 0, 1]}
    case = make_case(rule, SHAPES, **options)
    case.params[3] = case.params[3].contiguous(memory_format=torch.channels_last)
    return replace(case, hyper=case.hyper.repeat(2, 1))


def on_gpu(case: Case) -> Case:
    return replace(case, lists={name: [t.cuda() for t in tensors] for name, tensors in case.lists.items()})


def on_cpu(case: Case) -> Case:
    return replace(case, lists={name: [t.cpu() for t in tensors] for name, tensors in case.lists.items()})


def step(case: Case) -> None:
    from loco_ext.triton_kernels import optim_step

    optim_step.optim_step(case.arguments())


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_steps_do_not_wait_for_the_gpu(rule):
    case = new_case(rule)
    expected = case.copy()
    gpu = on_gpu(case)
    scale, found = torch.tensor(2.0), torch.tensor(0.0)
    gpu.options |= {"grad_scale": scale.cuda(), "found_inf": found.cuda(), "lrs": [torch.tensor(0.03).cuda()]}
    expected.options |= {"grad_scale": scale, "found_inf": found, "lrs": [torch.tensor(0.03)]}
    for each in (gpu, expected):
        each.options["lr_index"] = [-1, 0]
    step(on_gpu(case.copy(**gpu.options)))  # compiles
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            step(gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(3):
        expected.step("reference")
    assert_same(on_cpu(gpu), expected)


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_a_graph_repeats_the_steps_whatever_comes_between(rule):
    case = new_case(rule)
    expected, gpu = case.copy(), on_gpu(case)
    rate = torch.tensor(0.05, dtype=torch.float64)
    gpu.options |= {"lrs": [rate.cuda()], "lr_index": [0, -1]}
    expected.options |= {"lrs": [rate], "lr_index": [0, -1]}
    other = on_gpu(case.copy(**gpu.options))
    step(other)  # compiles
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph):
            step(gpu)
            step(gpu)
    for i in range(40):  # eager steps with other tables evict the first ones from the cache
        step(replace(other, hyper=other.hyper * (i + 1)))
        step(on_gpu(case))
    for i, value in enumerate([0.05, 0.01, 0.02, 0.07]):
        rate.fill_(value)
        gpu.options["lrs"][0].fill_(value)
        graphs[i % 2].replay()
        expected.step("reference").step("reference")
    torch.cuda.synchronize()
    assert_same(on_cpu(gpu), expected)


def test_streams_do_not_disturb_each_other():
    options = {"maps": [LOCO_2D], "map_index": [0] * 50}
    cases = [on_gpu(make_case("adam", SHAPES[:1] * 50, step=i, **options)) for i in range(4)]
    expected = [on_cpu(case).copy() for case in cases]
    step(on_gpu(expected[0]))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    for _ in range(5):
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                step(case)
    torch.cuda.synchronize()
    for case, each in zip(cases, expected, strict=True):
        for _ in range(5):
            each.step("reference")
        assert_same(on_cpu(case), each)
