"""Tests of six defects of torch 2.13's fused CPU optimizers: ours have none of them, torch's have all.

The tests of torch's optimizers document the claim. They run with torch 2.13 only: other versions may lack the defects.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from loco_ext import optim
from tests.tolerances import assert_within_ulps

pytestmark = pytest.mark.usefixtures("native")

only_torch_2_13 = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="about torch 2.13; the defect may be fixed elsewhere"
)
ours = optim.SGD
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def theirs(params, **options):
    return torch.optim.SGD(params, fused=True, **options)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def filled_memory():
    """Fill uninitialised memory with NaN, so that its use becomes visible."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def one_step_of_ones(make, dtype):
    param = nn.Parameter(torch.ones(100, dtype=dtype))
    param.grad = torch.ones_like(param)
    make([param], lr=0.5).step()
    return param.tolist()


@halves
def test_1_half_precision_is_stepped_everywhere(dtype):
    assert one_step_of_ones(ours, dtype) == [0.5] * 100


@only_torch_2_13
@halves
def test_1_torch_leaves_full_vectors_of_half_precision_alone(dtype):
    result = one_step_of_ones(theirs, dtype)
    assert result.count(1.0) > 50
    assert result[-1] == 0.5


def momentum_after_a_skipped_first_step(make):
    param = nn.Parameter(torch.ones(64))
    optimizer = make([param], lr=0.5, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    for value in (float("inf"), scaler.get_scale() / 2):
        param.grad = torch.full_like(param, value)
        scaler.step(optimizer)
        scaler.update()
    return param


@pytest.mark.usefixtures("filled_memory")
def test_2_momentum_starts_after_a_skipped_first_step():
    assert momentum_after_a_skipped_first_step(ours).tolist() == [0.5] * 64


@only_torch_2_13
@pytest.mark.usefixtures("filled_memory")
def test_2_torch_starts_momentum_from_uninitialised_memory():
    assert momentum_after_a_skipped_first_step(theirs).isnan().all()


def step_with_two_devices_found_inf(make):
    param = nn.Parameter(torch.ones(5))
    param.grad = torch.full_like(param, float("inf"))
    optimizer = make([param], lr=0.5)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(2.0)
    optimizer.step()
    return param


def test_3_inf_found_twice_skips_the_step():
    assert step_with_two_devices_found_inf(ours).tolist() == [1.0] * 5


@only_torch_2_13
def test_3_torch_steps_into_inf_found_twice():
    assert step_with_two_devices_found_inf(theirs).isinf().all()


def unfreeze_later(make):
    first, second = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    optimizer = make([first, second], lr=0.5, momentum=0.5)
    first.grad = torch.ones(5)
    optimizer.step()
    second.grad = torch.ones(5)
    optimizer.step()
    return first, second


def test_4_a_parameter_unfrozen_later_joins_a_group_with_momentum():
    first, second = unfreeze_later(ours)
    assert first.tolist() == [-0.25] * 5  # 1 - 0.5 - 0.5 * 1.5
    assert second.tolist() == [0.5] * 5


@only_torch_2_13
def test_4_torch_refuses_a_parameter_unfrozen_later():
    with pytest.raises(TypeError, match="NoneType"):
        unfreeze_later(theirs)


def step_channels_last_after_an_nchw_checkpoint(make):
    """Return the weight and its expected value."""
    weight, buffer, grad = torch.randn(3, 4, 3, 5, 5)
    saved = torch.optim.SGD([nn.Parameter(weight)], lr=0.5, momentum=0.5).state_dict()
    saved["state"] = {0: {"momentum_buffer": buffer}}
    param = nn.Parameter(weight.clone(memory_format=torch.channels_last))
    param.grad = grad.clone(memory_format=torch.channels_last)
    optimizer = make([param], lr=0.5, momentum=0.5)
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["fused"] = True
    optimizer.step()
    return param.detach(), weight - 0.5 * (grad + 0.5 * buffer)


def step_with_three_layouts(make):
    """Step a weight, gradient and momentum of different strides; return the weight and its expected value."""
    weight, buffer, grad = torch.randn(3, 6, 6, 5, 5)
    param = nn.Parameter(weight.clone(memory_format=torch.channels_last))
    param.grad = grad.transpose(0, 1).contiguous().transpose(0, 1)
    optimizer = make([param], lr=0.5, momentum=0.5)
    optimizer.state[param]["momentum_buffer"] = buffer.clone()
    optimizer.step()
    return param.detach(), weight - 0.5 * (grad + 0.5 * buffer)


layouts = pytest.mark.parametrize("step", [step_channels_last_after_an_nchw_checkpoint, step_with_three_layouts])


@layouts
def test_5_weights_gradients_and_states_may_differ_in_strides(step):
    assert_within_ulps(*step(ours), scale=4.0)


@only_torch_2_13
@layouts
def test_5_torch_steps_the_wrong_elements_where_strides_differ(step):
    result, expected = step(theirs)
    assert (result - expected).abs().max() > 0.1


def dtensor_step(make, mesh):
    param = nn.Parameter(distribute_tensor(torch.ones(5, 2, 3, 3), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.ones(5, 2, 3, 3), mesh, [Shard(0)])
    optimizer = make([param], lr=0.5, momentum=0.5)
    optimizer.step()
    optimizer.step()
    return param, optimizer.state[param]["momentum_buffer"]


def test_6_dtensors_are_stepped(mesh):
    param, buffer = dtensor_step(ours, mesh)
    assert isinstance(buffer, DTensor)
    assert buffer.placements == param.placements
    assert (param.full_tensor() == -0.25).all()
    assert (buffer.full_tensor() == 1.5).all()


@only_torch_2_13
def test_6_torch_cannot_step_dtensors(mesh):
    with pytest.raises(NotImplementedError, match="_fused_sgd_"):
        dtensor_step(theirs, mesh)
