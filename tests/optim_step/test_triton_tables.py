"""Tests of the table of a step's tensors that the Triton kernels get: its launches, and when it is copied."""

import importlib.util
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.optim_step.cases import make_case
from tests.optim_step.interpreter import BLOCK

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from loco_ext.triton_kernels import optim_step, uploads

CPU = torch.device("cpu")
MAP = torch.rand(3, 3, dtype=torch.float64)


def new_case():
    options = {"maps": [MAP], "map_index": [0, -1], "lrs": [torch.tensor(0.1)], "lr_index": [0], "first": [0, 0]}
    return make_case("sgd", [(6, 5, 3, 3), (7,)], **options)


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    made = uploads.Uploads(size=100)
    monkeypatch.setattr(optim_step, "_UPLOADS", made)
    return made


def memory_of(case) -> torch.Tensor:
    return optim_step.upload_table(optim_step.describe(case.arguments()), CPU).memory


def test_an_equal_step_finds_its_table_and_any_change_makes_a_new_one():
    case = new_case()
    first = memory_of(case)
    before = first.clone()
    other = [torch.zeros_like(t) for t in case.params]
    grads = case.lists["grads"]
    changes = [
        ({"params": other}, {}),
        ({"grads": [grads[0], other[1]]}, {}),
        ({"grads": [grads[0].transpose(2, 3).contiguous().transpose(2, 3), grads[1]]}, {}),
        ({"grads": [grads[0].bfloat16(), grads[1]]}, {}),
        ({"momentum_buffers": []}, {"first": []}),
        ({"momentum_buffers": other}, {}),
        ({}, {"group_index": [0, 0], "lr_index": [-1]}),
        ({}, {"lrs": [torch.tensor(0.1)]}),
        ({}, {"map_index": [-1, -1]}),
        ({}, {"maps": [MAP * 2]}),
        ({}, {"maps": [MAP[:1]]}),
        ({}, {"first": [0, 1]}),
        ({}, {"seed": 1, "ordinals": [1, 0]}),
        ({}, {"seed": 1, "ordinals": [0, 1]}),
    ]
    memories = [first]
    for lists, options in changes:
        changed = replace(case, lists={**case.lists, **lists}, options={**case.options, **options})
        memories.append(memory_of(changed))
    hyper = case.hyper.clone()
    case.hyper[0, 1] += 1
    memories.append(memory_of(case))
    assert len({memory.data_ptr() for memory in memories}) == len(memories)
    case.hyper = hyper
    case.options["maps"] = [MAP.clone()]
    assert memory_of(case) is first
    assert torch.equal(first, before)


def test_only_the_most_recent_tables_are_kept(cache):
    cache.size = 2
    cases = [new_case() for _ in range(3)]
    memories = [memory_of(cases[i]) for i in (0, 1, 0, 2)]
    assert memories[0] is memories[2]
    assert memory_of(cases[0]) is memories[0]
    assert memory_of(cases[1]) is not memories[1]


def test_other_streams_have_tables_of_their_own(monkeypatch):
    case = new_case()
    first = memory_of(case)
    monkeypatch.setattr(uploads, "_stream", lambda device: 7)
    assert memory_of(case) is not first


def test_tables_that_a_graph_reads_are_kept_for_good_and_shared_with_nothing(monkeypatch, cache):
    cache.size = 1
    case = new_case()
    eager = memory_of(case)
    with monkeypatch.context() as patch:
        patch.setattr(uploads, "is_capturing", lambda device: True)
        captured = [memory_of(case), memory_of(case)]
    assert len({memory.data_ptr() for memory in (eager, *captured)}) == 3
    before = captured[0].clone()
    for _ in range(3):
        memory_of(new_case())
    assert torch.equal(captured[0], before)
    assert [tensors[0] is memory for (tensors, _host), memory in zip(cache._captured, captured, strict=True)]
    assert all(torch.equal(host, before) for _tensors, host in cache._captured)


def test_tensors_share_a_launch_if_dtypes_and_layout_allow():
    case = make_case("sgd", [(6, 5, 3, 3), (7,), (0, 2), (BLOCK * 2 + 1,), (6, 5, 3, 3), (9,), (8,)])
    case.params[4] = case.params[4].contiguous(memory_format=torch.channels_last)
    case.lists["grads"][5] = case.lists["grads"][5].to(torch.bfloat16)
    case.params[6] = torch.zeros(9)[1:]
    args = case.arguments()
    table = optim_step.upload_table(optim_step.describe(args), CPU)
    chunks = table.memory[table.chunks_at :].numpy().view(np.int32).reshape(-1, 3)
    owned = {}
    for kind, first, count in table.launches:
        form = optim_step.form_of(kind, args)
        dtypes = "-".join(str(dtype) for dtype in form.dtypes[:3])
        owned[dtypes, form.flat, form.aligned, form.wide] = chunks[first : first + count].tolist()
    assert owned == {
        ("fp32-fp32-fp32", True, True, False): [[3, 0, 1], [3, 1, 1], [3, 2, 1], [0, 0, 1], [1, 0, 1]],
        ("fp32-fp32-fp32", False, False, False): [[4, 0, 1]],
        ("fp32-bf16-fp32", True, True, False): [[5, 0, 1]],
        ("fp32-fp32-fp32", True, False, False): [[6, 0, 1]],
    }


def test_uploaded_arrays_begin_at_16_bytes():
    for first, second in itertools.product([0, 1, 2, 3], repeat=2):
        arrays = [np.arange(first, dtype=np.int32), np.arange(second) / 3, np.arange(5, dtype=np.int64)]
        tensors, host = uploads.upload(arrays, CPU)
        for tensor, array in zip(tensors, arrays, strict=True):
            assert tensor.numpy().dtype == array.dtype
            assert tensor.tolist() == array.tolist()
            assert array.size == 0 or (tensor.data_ptr() - host.data_ptr()) % 16 == 0


def test_host_memory_is_pinned(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: (pinned.append(tensor), tensor)[1])
    (there,), host = uploads.upload([np.arange(3)], torch.device("meta"))
    assert (there.shape, there.dtype) == ((3,), torch.int64)
    assert host[:24].view(torch.int64).tolist() == [0, 1, 2]
    assert len(pinned) == 1


@pytest.mark.parametrize("name", ["params", "grads", "momentum_buffers"])
def test_lazily_negated_views_are_refused(name):
    case = new_case()
    case.lists[name][1] = torch._neg_view(case.lists[name][1])
    before = case.lists["params"][0].clone()
    with pytest.raises(RuntimeError):
        optim_step.optim_step(case.arguments())
    assert torch.equal(case.lists["params"][0], before)
