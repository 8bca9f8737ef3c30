"""Six defects of torch 2.13's fused CPU optimizers: ours have none of them, torch's have all.

Torch's optimizers are tested to document the claim, and with torch 2.13 only: other versions may lack the defects.
"""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from loco_ext import optim
from tests.tolerances import assert_within_ulps


def torchs(params, **options):
    return torch.optim.SGD(params, fused=True, **options)


only_torch_2_13 = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="about torch 2.13; the defect may be fixed elsewhere"
)
pytestmark = pytest.mark.parametrize(
    "make", [pytest.param(optim.SGD, id="ours"), pytest.param(torchs, id="torch", marks=only_torch_2_13)]
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_1_half_precision_is_stepped_everywhere(make, dtype):
    """Torch leaves full vectors alone."""
    param = nn.Parameter(torch.ones(100, dtype=dtype))
    param.grad = torch.ones_like(param)
    make([param], lr=0.5).step()
    if make is torchs:
        assert param.tolist().count(1.0) > 50
        assert param[-1] == 0.5
    else:
        assert param.tolist() == [0.5] * 100


@pytest.fixture
def filled_memory():
    """Fill uninitialised memory with NaN, so that its use becomes visible."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled_memory")
def test_2_momentum_starts_after_a_skipped_first_step(make):
    """Torch's starts from uninitialised memory."""
    param = nn.Parameter(torch.ones(64))
    optimizer = make([param], lr=0.5, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    for value in (float("inf"), scaler.get_scale() / 2):
        param.grad = torch.full_like(param, value)
        scaler.step(optimizer)
        scaler.update()
    if make is torchs:
        assert param.isnan().all()
    else:
        assert param.tolist() == [0.5] * 64


def test_3_inf_found_by_two_devices_skips_the_step(make):
    param = nn.Parameter(torch.ones(5))
    param.grad = torch.full_like(param, float("inf"))
    optimizer = make([param], lr=0.5)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(2.0)
    optimizer.step()
    assert param.isinf().all() if make is torchs else param.tolist() == [1.0] * 5


def test_4_a_parameter_unfrozen_later_joins_a_group_with_momentum(make):
    first, second = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    optimizer = make([first, second], lr=0.5, momentum=0.5)
    first.grad = torch.ones(5)
    optimizer.step()
    second.grad = torch.ones(5)
    if make is torchs:
        with pytest.raises(TypeError, match="NoneType"):
            optimizer.step()
        return
    optimizer.step()
    assert first.tolist() == [-0.25] * 5  # 1 - 0.5 - 0.5 * 1.5
    assert second.tolist() == [0.5] * 5


def test_5_weights_gradients_and_states_may_differ_in_strides(make):
    """Torch steps the wrong elements."""
    weight, buffer, grad = torch.randn(3, 6, 6, 5, 5)
    param = nn.Parameter(weight.clone(memory_format=torch.channels_last))
    param.grad = grad.transpose(0, 1).contiguous().transpose(0, 1)
    optimizer = make([param], lr=0.5, momentum=0.5)
    optimizer.state[param]["momentum_buffer"] = buffer.clone()
    optimizer.step()
    expected = weight - 0.5 * (grad + 0.5 * buffer)
    if make is torchs:
        assert (param - expected).abs().max() > 0.1
    else:
        assert_within_ulps(param.detach(), expected, scale=4.0)


def test_6_dtensors_are_stepped(make, mesh):
    param = nn.Parameter(distribute_tensor(torch.ones(5, 2, 3, 3), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.ones(5, 2, 3, 3), mesh, [Shard(0)])
    optimizer = make([param], lr=0.5, momentum=0.5)
    if make is torchs:
        with pytest.raises(NotImplementedError, match="_fused_sgd_"):
            optimizer.step()
        return
    optimizer.step()
    optimizer.step()
    assert (param.full_tensor() == -0.25).all()
