"""The CUDA step on devices that the runner of CUDA kernels makes up, and with blocks that run at the same time."""

import itertools
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from loco_ext import optim
from tests.cuda_on_cpu import operators
from tests.optim_step.cases import assert_same, assert_untouched, make_case
from tests.tolerances import same_bits

pytestmark = pytest.mark.usefixtures("cuda_on_cpu")


@pytest.fixture
def gpus(compiled) -> Iterator[ModuleType]:
    library = operators.library(compiled)
    yield library
    library.set_missing("")
    library.set_order("forward")


def put(library: ModuleType, index: int, *tensors: Tensor) -> None:
    for tensor in tensors:
        library.set_device(tensor.data_ptr(), index)


def test_a_model_that_moves_between_devices_is_stepped_where_it_is(gpus):
    """A launch on another device than that of the tensors, or on a stream of before, would end the process."""
    params = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5))]
    optimizer = optim.SGD(params, lr=0.5)
    for index in (0, 1, 0):
        for param in params:
            param.grad = torch.ones_like(param)
            put(gpus, index, param, param.grad)
        optimizer.step()
        for param in params:
            put(gpus, -1, param, param.grad)
    assert all((param == -0.5).all() for param in params)


@pytest.mark.parametrize("moved", ["params", "grads", "momentum_buffers"])
def test_tensors_on_two_devices_are_refused(gpus, moved):
    case = make_case("sgd", [(3, 4), (5,)])
    before = case.copy()
    tensors = [tensor for tensors in case.lists.values() for tensor in tensors]
    put(gpus, 0, *tensors)
    put(gpus, 1, case.lists[moved][1])
    try:
        with pytest.raises(RuntimeError, match=rf"{moved}\[1\]: expected a tensor on cpu:0, got one on cpu:1"):
            case.step()
    finally:
        put(gpus, -1, *tensors)
    assert_untouched(case, before)


def test_a_kernel_that_the_device_has_no_code_for_is_an_error(gpus):
    case = make_case("adam", [(3, 4), (5,)])
    gpus.set_missing("step_vectors")
    with pytest.raises(RuntimeError, match="the GPU refused a kernel: no kernel image is available"):
        case.step()
    gpus.set_missing("")
    case.step()


def test_gradients_that_lie_in_a_larger_buffer_take_no_launch_of_their_own(gpus):
    """DistributedDataParallel's gradients are views of one buffer, and begin at any element."""
    launches = []
    for shift in (0, 1, 3):
        params = [nn.Parameter(torch.linspace(-1, 1, 999, dtype=torch.bfloat16)) for _ in range(2)]
        for param, begin in zip(params, (0, shift), strict=True):
            param.grad = torch.ones(1007, dtype=torch.bfloat16)[begin : begin + 999]
        before = gpus.launches()
        optim.SGD(params, lr=0.5).step()
        launches.append(gpus.launches() - before)
        assert torch.equal(params[0], params[1])
    assert launches[0] == launches[1] == launches[2]


SIZES = (0.0, 2.0**-149, 2.0**-125, 2.0**-71, 2.0**-70, 1.0, 2.0**61, 2.0**126, torch.inf, torch.nan)


@pytest.mark.parametrize(
    ("hyper", "amsgrad"),
    [
        ((0.05, 0.0, 0.9, 0.99, 1e-8), False),
        ((1e-3, 0.1, 0.4, 1.0, 0.0), True),
        ((1e30, 0.0, 0.9, 0.0, 0.0), False),
        ((1e30, 0.0, 0.9, 0.0, 0.0), True),
    ],
)
def test_adam_rounds_correctly_at_the_ends_of_the_range(hyper, amsgrad):
    """Whole vectors of each size: quotients that underflow, overflow, or are of zeros, infinities and NaN."""
    case = make_case("adam", [(len(SIZES) ** 2, 32)], hyper=hyper, states=2 + amsgrad, amsgrad=amsgrad)
    of_mean, of_variance = (torch.tensor(sizes) for sizes in zip(*itertools.product(SIZES, repeat=2), strict=True))
    for name in ("params", "grads", "exp_avgs"):
        case.lists[name][0] *= of_mean[:, None]
    case.lists["exp_avg_sqs"][0] *= of_variance[:, None]
    actual, expected = case.copy().step(), case.copy().step("reference")
    for name, tensors in expected.lists.items():
        for a, b in zip(actual.lists[name], tensors, strict=True):
            assert torch.equal(a.isnan(), b.isnan()), name
            assert same_bits(a[~a.isnan()], b[~b.isnan()]), name


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_blocks_at_the_same_time_give_the_same_bits(gpus, rule):
    """The result does not depend on which blocks run at a time, or on how they take turns."""
    case = make_case(rule, [(40, 300, 3), (7,)], dtypes=[torch.bfloat16] * 3, grad_scale=torch.tensor(2.0))
    results = []
    for order in ("forward", "1"):
        gpus.set_order(order)
        results.append(case.copy().step())
    assert_same(*results)
