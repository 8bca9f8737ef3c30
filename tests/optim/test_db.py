"""torch's checks of its own optimizers, run on our classes: the tests of how they step.

The wheel ships torch's optimizer database but not the test class TestOptimRenewed that reads it. These are its checks,
for every input of the database and each implementation of ours; test_db_state.py has those of checkpoints, hooks and
memory. Copies, closures, layouts, absent and scaled gradients are checked beside torch's loop in test_life.py,
test_state.py and test_amp.py. These checks of TestOptimRenewed are left out or take another form:

    check                                      reason
    optim_infos_do_not_specify_...             about the database itself
    ..._right_direction_multigpu               needs two GPUs
    capturable inputs, in every check          need CUDA; test_capturable_goes_the_right_direction runs on one
    rosenbrock_sparse                          kernels refuse sparse gradients; torch's own functions act as usual
    complex, complex_2d                        kernels refuse complex numbers; likewise
    fused_error_on_params_on_meta              the reference serves devices without kernels; a forced backend refuses
    fused_cpu_matches_cuda                     needs CUDA
    state_dict_with_cuda_params                needs CUDA
    mixed_device_dtype                         needs CUDA for two devices; dtypes are mixed on the CPU
    peak_memory_foreach                        needs CUDA's allocator; a step's allocations are measured on the CPU
    foreach_large_tensor, fused_large_tensor   need tens of GB
    defaults_changed_to_foreach                our default is our kernels, on every device
"""

import re

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR
from torch.testing import assert_close
from torch.testing._internal.common_optimizers import OptimizerErrorEnum

import loco_ext
from tests.optim import db_cases as db
from tests.optim.db_cases import (
    INFOS,
    KERNELS,
    OURS,
    TORCHS_OWN,
    Case,
    Problem,
    assert_same,
    cases,
    each_optimizer,
    flat_state,
)

pytestmark = pytest.mark.usefixtures("native", "one_thread")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def assert_right_direction(case: Case, before: float, after: float) -> None:
    assert after > before if case.arguments.get("maximize") else after < before


@cases()
def test_schedulers_lead_groups_as_they_lead_torchs(case):
    for schedulers in case.scheduler_lists():
        problem = Problem()
        twin = problem.twin()
        optimizers = tuple(
            make([{"params": [each.weight]}, {"params": [each.bias], "lr": 0.01}])
            for make, each in ((case.ours, problem), (case.torchs, twin))
        )
        for each, optimizer in zip((problem, twin), optimizers, strict=True):
            before = each.closure().item()
            assert_right_direction(case, before, each.run(optimizer, 8, [make(optimizer) for make in schedulers]))
        assert_close(*map(flat_state, optimizers))
        assert_close(*[[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers])


@cases()
def test_a_tensor_lr_is_a_number(case):
    if case.implementation == "foreach" and case.name != "SGD":
        pytest.skip(db.NO_TENSOR_LR)
    rate = float(case.arguments.get("lr", 1e-3))
    for dimensions in range(3):
        lr = torch.tensor(rate, dtype=torch.float64).reshape([1] * dimensions)
        problem = Problem(torch.float64)
        twin = problem.twin()
        optimizers = case.ours(problem.params, lr=lr), case.ours(twin.params, lr=rate)
        for each, optimizer in zip((problem, twin), optimizers, strict=True):
            each.run(optimizer, 6, [ExponentialLR(optimizer, gamma=0.5)])
        assert_close(*map(flat_state, optimizers))
        assert optimizers[0].param_groups[0]["lr"] is lr
        assert lr.item() == pytest.approx(rate * 0.5**6)


@cases()
def test_a_group_without_decay_stays_where_its_gradient_is_zero(case):
    problem = Problem()
    groups = [{"params": [problem.weight], "weight_decay": 0.1}, {"params": [problem.bias], "weight_decay": 0.0}]
    optimizer = case.ours(groups, lr=1e-3, maximize=False)
    before = [param.clone() for param in problem.params]
    for param in problem.params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert (problem.weight.abs() < before[0].abs()).all()
    assert torch.equal(problem.bias, before[1])


@cases("reference")
def test_matches_the_forloop(case):
    assert_matches_the_forloop(case, torch.float64)
    if case.description == db.RICHEST[case.name]:
        for dtype in DTYPES[1:]:
            assert_matches_the_forloop(case, dtype)


@cases(*KERNELS)
def test_kernels_match_the_forloop(case):
    """Test float32 only: tests of the operators compare kernels with the reference bit for bit in all dtypes."""
    assert_matches_the_forloop(case, torch.float32)


def assert_matches_the_forloop(case: Case, dtype: torch.dtype) -> None:
    allowed = db.tolerance(case.name, "test_fused_matches_forloop", dtype)
    ours_network, torchs_network = db.network(dtype), db.network(dtype)
    changes = case.coarse() if dtype.itemsize == 2 else {}
    ours = case.ours(ours_network.parameters(), **changes)
    torchs = case.torchs(torchs_network.parameters(), **changes)
    for step in range(7):
        for network, optimizer in ((ours_network, ours), (torchs_network, torchs)):
            network(torch.linspace(0.1, 0.6, 6, dtype=dtype).reshape(3, 2)).sum().backward()
            if step == 3:
                optimizer.zero_grad()  # one of the steps has no gradients
            optimizer.step()
            optimizer.zero_grad()
        for actual, expected in zip(flat_state(ours), flat_state(torchs), strict=True):
            assert_close(actual, expected, **allowed)
            actual.detach().copy_(expected.detach())  # so that rounding errors do not accumulate


@cases(*TORCHS_OWN)
def test_torchs_implementations_are_torchs_to_the_bit(case):
    for dtype in DTYPES if case.description == db.RICHEST[case.name] else DTYPES[:1]:
        problem = Problem(dtype)
        twin = problem.twin()
        changes = case.coarse() if dtype.itemsize == 2 else {}
        ours = case.ours(problem.params, **changes)
        torchs = case.torchs(twin.params, foreach=case.implementation == "foreach", **changes)
        problem.run(ours, 3)
        twin.run(torchs, 3)
        assert_same(flat_state(ours), flat_state(torchs))


@cases()
def test_dtypes_mixed_in_a_group_step_as_each_alone(case):
    problems = [Problem(dtype) for dtype in DTYPES]
    twins = [problem.twin() for problem in problems]
    together = case.ours([param for problem in problems for param in problem.params], **case.coarse())
    alone = [case.ours(twin.params, **case.coarse()) for twin in twins]
    for _ in range(3):
        for problem in problems:
            problem.closure()
        together.step()
        for twin, optimizer in zip(twins, alone, strict=True):
            optimizer.step(twin.closure)
    assert_same(flat_state(together)[:8], [param for twin in twins for param in twin.params])


@pytest.mark.parametrize("case", db.capturable_cases())
def test_capturable_goes_the_right_direction(case):
    problem = Problem()
    params = [param.cuda() for param in problem.params]
    with loco_ext.backend("reference"):
        optimizer = case.ours(params)
        before = problem.closure().item()
        for _ in range(8):
            problem.closure()
            for param, source in zip(params, problem.params, strict=True):
                param.grad = source.grad.cuda()
            optimizer.step()
            for param, source in zip(params, problem.params, strict=True):
                source.copy_(param)
    assert_right_direction(case, before, problem.closure().item())


@each_optimizer
def test_the_databases_errors_are_raised(name):
    for item in INFOS[name].optim_error_inputs_func("cpu", torch.float32):
        given = item.optimizer_error_input
        params = given.params if given.params is not None else Problem().params
        assert item.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR, given.desc
        if item.error_type is UserWarning:
            with pytest.warns(UserWarning, match=item.error_regex):
                OURS[name](params, **given.kwargs)
        else:
            with pytest.raises(item.error_type, match=rf"{item.error_regex}|^[a-z_0-9\[\]]+: expected .* got "):
                OURS[name](params, **given.kwargs)


@each_optimizer
@pytest.mark.parametrize("other", TORCHS_OWN)
def test_fused_excludes_torchs_implementations(name, other):
    with pytest.raises(RuntimeError, match=f"`fused`.*`{other}`"):
        OURS[name](Problem().params, fused=True, **{other: True})


@each_optimizer
def test_duplicate_parameters_are_refused_before_anything_is_written(name):
    problem = Problem()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = OURS[name]([problem.weight, problem.weight])
    before = problem.weight.clone()
    problem.closure()
    with pytest.raises(ValueError, match=r"params\[0\].*params\[1\].*overlap"):
        optimizer.step()
    assert torch.equal(problem.weight, before)
    assert not any(optimizer.state.values())


def complex_twins() -> tuple[torch.Tensor, torch.Tensor]:
    param = torch.randn(5, 5, dtype=torch.complex64)
    return param, param.clone()


@cases(every=())
def test_complex_parameters_step_as_in_torch_or_are_refused(case):
    ours, torchs = complex_twins()
    optimizer = case.ours([ours])
    expected = case.torchs([torchs], foreach=case.implementation == "foreach")
    ours.grad = torch.randn_like(ours)
    torchs.grad = ours.grad.clone()
    if case.implementation in TORCHS_OWN:
        optimizer.step()
        expected.step()
    else:
        with pytest.raises(TypeError, match=r"params\[0\]: expected float32.*got torch.complex64"):
            optimizer.step()
        assert not any(optimizer.state.values())
    assert torch.equal(ours, torchs)


def sparse_problem(optimizer_class, **kwargs):
    """Return an optimizer and its parameter, which has an uncoalesced sparse gradient."""
    param = torch.tensor([1.5, 1.5, -0.5])
    param.grad = torch.sparse_coo_tensor([[0, 0, 2]], [0.25, 0.75, -1.0], (3,), check_invariants=True)
    return optimizer_class([param], **kwargs), param


@pytest.mark.parametrize("weight_decay", [0, 0.1])
@cases(every=())
def test_sparse_gradients_step_as_in_torch_or_are_refused(case, weight_decay):
    torchs_flags = {**db.FOR_LOOP, **db.IMPLEMENTATIONS[case.implementation], "fused": False}
    optimizer, param = sparse_problem(OURS[case.name], **case.kwargs(weight_decay=weight_decay))
    options = {**case.kwargs(weight_decay=weight_decay), **torchs_flags}
    expected, torchs = sparse_problem(INFOS[case.name].optim_cls, **options)
    if case.implementation not in TORCHS_OWN:
        with pytest.raises(TypeError, match=r"grads\[0\]: expected a dense tensor, got layout torch.sparse_coo"):
            optimizer.step()
    elif case.name == "SGD" and not weight_decay:
        expected.step()
        optimizer.step()
    else:
        with pytest.raises(RuntimeError) as from_torch:
            expected.step()
        with pytest.raises(RuntimeError, match=re.escape(str(from_torch.value))):
            optimizer.step()
    assert torch.equal(param, torchs)


@each_optimizer
def test_a_backend_without_kernels_for_the_device_refuses_by_name(name):
    param = torch.empty(3, device="meta")
    param.grad = torch.empty_like(param)
    with pytest.raises(RuntimeError, match="no native kernel for meta"):
        OURS[name]([param]).step()


@pytest.mark.parametrize("locality", [None, (0.5, 2.0)], ids=["uniform", "local"])
@cases("differentiable")
def test_differentiates_through_a_step(case, locality):
    before = torch.randn(1, 1, 3, 3, dtype=torch.float64)
    before.grad = torch.randn_like(before)
    first = case.ours([before], locality=locality)
    first.step()

    def second_step(param, grad, lr):
        param = param.clone()
        param.grad = grad
        optimizer = case.ours([param], lr=lr, locality=locality)
        optimizer.state[param] = {key: value.clone() for key, value in first.state[before].items() if value is not None}
        optimizer.step()
        return tuple(flat_state(optimizer))

    inputs = [torch.randn_like(before), torch.randn_like(before), torch.tensor(0.3, dtype=torch.float64)]
    assert torch.autograd.gradcheck(second_step, [tensor.requires_grad_() for tensor in inputs])


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("implementation", db.IMPLEMENTATIONS)
def test_the_default_dtype_decides_the_dtype_of_the_step_count_as_in_torch(name, implementation):
    torch.set_default_dtype(torch.float64)
    case = Case(name, implementation, "", {})
    problem = Problem(torch.float32)
    twin = problem.twin()
    ours, torchs = case.ours(problem.params), case.torchs(twin.params, fused=implementation == "fused")
    problem.run(ours, 1)
    twin.run(torchs, 1)
    assert ours.state[problem.weight]["step"].dtype == torchs.state[twin.weight]["step"].dtype
