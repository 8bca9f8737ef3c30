"""Tests of the tables that the optimizer step's Triton kernels read: nests, and when tables are rebuilt."""

import itertools

import numpy as np
import pytest
import torch
from loco_ext.triton_kernels import optim_step_tables as tables
from loco_ext.triton_kernels import uploads

from tests.optim_step.test_layouts import LAYOUTS, OTHER_SHAPES

CPU = torch.device("cpu")


def offsets(axes: tables.Axes) -> np.ndarray:
    """Return each element's offset by a nest, in the order of element numbers."""
    result = np.zeros(1, dtype=np.int64)
    for size, stride in axes:
        result = np.add.outer(np.arange(size) * stride, result).ravel()
    return result


def places(tensor: torch.Tensor) -> np.ndarray:
    """Return each element's offset by the tensor's strides, in the order of its indices."""
    result = np.zeros(1, dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        result = np.add.outer(result, np.arange(size) * stride).ravel()
    return result


TENSORS = [layout(torch.zeros(6, 5, 3, 3)) for layout in LAYOUTS.values()]


@pytest.mark.parametrize("lead", TENSORS, ids=list(LAYOUTS))
def test_a_nest_leads_to_the_same_elements_in_every_operand(lead):
    order = np.argsort(places(lead))
    shape = tuple(lead.shape)
    for operand in TENSORS:
        walked = offsets(tables.nest(shape, lead.stride(), operand.stride()))
        assert walked.tolist() == places(operand)[order].tolist()
    logical = offsets(tables.nest(shape, lead.stride(), tables.contiguous_strides(shape)))
    assert logical.tolist() == order.tolist()
    for map_shape in [(), (1,), (3, 3), (5, 1, 1), (6, 1, 1, 3), (6, 5, 3, 3)]:
        own = torch.arange(np.prod(map_shape, dtype=int)).reshape(map_shape)
        walked = offsets(tables.nest(shape, lead.stride(), tables.map_strides(map_shape, shape)))
        assert walked.tolist() == own.expand(shape).flatten()[order].tolist()


@pytest.mark.parametrize("which", OTHER_SHAPES)
def test_a_parameters_own_nest_is_flat_where_it_has_no_gaps(which):
    shape, layout = OTHER_SHAPES[which]
    tensor = layout(torch.zeros(shape))
    if tensor.numel() == 0:
        return
    axes = tables.nest(tuple(shape), tensor.stride(), tensor.stride())
    dense = tensor.numel() == 1 + sum((n - 1) * s for n, s in zip(shape, tensor.stride(), strict=True))
    assert tables.is_flat(axes) == dense
    assert sorted(offsets(axes)) == sorted(places(tensor))


def make_step(shapes=((6, 5, 3, 3), (7,)), **lists) -> tables.Step:
    generator = torch.Generator().manual_seed(0)
    params, grads, buffers = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(3))
    count = len(params)
    given = {"group_index": [0] * count, "lrs": [], "lr_index": [], "maps": [], "map_index": [-1] * count}
    return tables.Step(params, grads, [buffers], **{**given, **lists})


def changed(step: tables.Step, **lists) -> tables.Step:
    return tables.Step(**{**vars(step), **lists})


def read_as(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(tensor.untyped_storage(), 0, tensor.shape, tensor.stride())


def test_an_equal_step_finds_its_tables_and_any_change_makes_new_ones():
    decay_map = torch.rand(3, 3, dtype=torch.float64)
    lr = torch.tensor(0.1)
    step = make_step(maps=[decay_map], map_index=[0, -1], lrs=[lr], lr_index=[0], ordinals=[0, 1])
    made = tables.Tables(size=100)
    first = made.plan(step)
    other = [torch.zeros_like(t) for t in step.params]
    changes = [
        {"params": other},
        {"grads": [step.grads[0], other[1]]},
        {"grads": [step.grads[0].transpose(2, 3), step.grads[1]]},
        {"grads": [read_as(torch.bfloat16, step.grads[0]), step.grads[1]]},
        {"states": []},
        {"states": [], "steps": step.states[0]},
        {"states": [other]},
        {"steps": [torch.zeros(()), torch.zeros(())]},
        {"group_index": [0, 1], "lr_index": [0, -1]},
        {"lrs": [lr.clone()]},
        {"lr_index": [-1]},
        {"lr_index": []},
        {"map_index": [-1, -1]},
        {"maps": [decay_map.clone() * 2]},
        {"maps": [decay_map[:1]]},
        {"first": [0, 1]},
        {"ordinals": [1, 0]},
    ]
    plans = [first, *(made.plan(changed(step, **change)) for change in changes)]
    assert len({id(plan) for plan in plans}) == len(plans)
    assert made.plan(changed(step, maps=[decay_map.clone()])) is first
    decay_map[1, 1] += 1
    after = made.plan(step)
    assert after is not first
    assert after.maps.tolist() == decay_map.flatten().tolist()


def test_rows_of_hyperparameters_are_known_by_their_values():
    made = tables.Tables()
    hyper = torch.rand(2, 5, dtype=torch.float64)
    first = made.hyper(hyper, CPU)
    assert first.tolist() == hyper.flatten().tolist()
    assert made.hyper(hyper.clone(), CPU) is first
    before = first.clone()
    hyper[1, 0] += 1
    assert made.hyper(hyper, CPU).tolist() == hyper.flatten().tolist()
    assert torch.equal(first, before)


def test_only_the_most_recent_tables_are_kept():
    made = tables.Tables(size=2)
    steps = [make_step(first=[i, 1]) for i in range(3)]
    plans = [made.plan(steps[i]) for i in (0, 1, 0, 2)]
    assert plans[0] is plans[2]
    assert made.plan(steps[0]) is plans[0]
    assert made.plan(steps[1]) is not plans[1]


def test_other_streams_have_tables_of_their_own(monkeypatch):
    made, step = tables.Tables(), make_step()
    first = made.plan(step)
    monkeypatch.setattr(uploads, "_stream", lambda device: 7)
    assert made.plan(step) is not first


def test_tables_that_a_graph_reads_are_kept_for_good_and_shared_with_nothing(monkeypatch):
    made, step = tables.Tables(size=1), make_step()
    hyper = torch.rand(1, 4, dtype=torch.float64)
    eager = made.plan(step)
    with monkeypatch.context() as patch:
        patch.setattr(uploads, "is_capturing", lambda device: True)
        captured = [made.plan(step), made.plan(step)]
        rows = made.hyper(hyper, CPU)
    assert len({id(plan) for plan in (eager, *captured)}) == 3
    before = [t.clone() for t in (captured[0].rows, captured[0].axes, captured[0].host, rows)]
    hyper += 1
    for i in range(3):
        made.plan(make_step(first=[i, 1]))
        made.hyper(hyper, CPU)
    assert all(map(torch.equal, (captured[0].rows, captured[0].axes, captured[0].host, rows), before))
    kept = [thing for thing in made._captured if isinstance(thing, tables.Plan)]
    assert [id(plan) for plan in kept] == [id(plan) for plan in captured]
    assert len(made._captured) == 3


def test_tensors_share_a_launch_if_dtypes_and_layout_allow():
    shapes = [(6, 5, 3, 3), (7,), (0, 2), (tables.BLOCK * 2 + 1,), (6, 5, 3, 3), (9,), (8,)]
    step = make_step(shapes)
    step.params[4] = step.params[4].contiguous(memory_format=torch.channels_last)
    step.grads[5] = step.grads[5].to(torch.bfloat16)
    step.params[6] = torch.zeros(9)[1:]
    plan = tables.Tables().plan(step)
    f32, bf16 = torch.float32, torch.bfloat16
    owned = {batch.kind: batch.owners.tolist() for batch in plan.batches}
    assert owned == {
        tables.Kind((f32, f32, f32), True, True, False): [0, 1, 3, 3, 3],
        tables.Kind((f32, f32, f32), False, False, False): [4],
        tables.Kind((f32, bf16, f32), True, True, False): [5],
        tables.Kind((f32, f32, f32), True, False, False): [6],
    }
    rows = plan.rows.numpy().view(tables.ROW)
    assert rows["first_chunk"].tolist() == [0, 1, 0, 2, 0, 0, 0]
    assert rows["numel"].tolist() == [t.numel() for t in step.params]


@pytest.mark.parametrize("lengths", list(itertools.product([0, 1, 2, 3], repeat=2)))
def test_uploaded_arrays_begin_at_16_bytes(lengths):
    arrays = [
        np.arange(lengths[0], dtype=np.int32),
        np.arange(lengths[1], dtype=np.float64) / 3,
        np.arange(5, dtype=np.int64),
    ]
    tensors, host = uploads.upload(arrays, CPU)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert tensor.tolist() == array.tolist()
        assert array.size == 0 or (tensor.data_ptr() - host.data_ptr()) % 16 == 0
