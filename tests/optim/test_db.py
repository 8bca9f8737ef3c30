"""torch's checks of its own optimizers, run on our classes: the tests of how they step.

The wheel ships torch's optimizer database but not the test class TestOptimRenewed that reads it. These are its checks
of steps, for the inputs of the database and our implementations. Copies, checkpoints, hooks, closures, layouts, absent
and scaled gradients are checked beside torch's loop in test_life.py, test_state.py and test_amp.py. Inputs that are
capturable need CUDA and are left out.
"""

import pytest
import torch
from torch.testing import assert_close
from torch.testing._internal.common_optimizers import OptimizerErrorEnum

from tests.optim import db_cases as db
from tests.optim.db_cases import INFOS, KERNELS, OURS, TORCHS_OWN, Case, Problem, cases, flat_state
from tests.tolerances import same_bits

pytestmark = pytest.mark.usefixtures("native", "one_thread")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ALL_OTHERS = ("reference", *TORCHS_OWN)


@cases(*KERNELS, "reference")
def test_matches_the_forloop(case):
    """Kernels step float32 only: tests of the operators compare them with the reference bit for bit in all dtypes."""
    richest = case.description == db.RICHEST[case.name]
    for dtype in [torch.float32] if case.implementation in KERNELS else DTYPES if richest else DTYPES[:1]:
        changes = case.coarse() if dtype.itemsize == 2 else {}
        networks = db.network(dtype), db.network(dtype)
        ours = case.ours(networks[0].parameters(), **changes)
        torchs = case.torchs(networks[1].parameters(), **changes)
        for step in range(7):
            for network, optimizer in zip(networks, (ours, torchs), strict=True):
                network(torch.linspace(0.1, 0.6, 6, dtype=dtype).reshape(3, 2)).sum().backward()
                if step == 3:
                    optimizer.zero_grad()  # one of the steps has no gradients
                optimizer.step()
                optimizer.zero_grad()
            for actual, expected in zip(flat_state(ours), flat_state(torchs), strict=True):
                assert_close(actual, expected)
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
        assert all(map(same_bits, flat_state(ours), flat_state(torchs)))


@cases(*KERNELS, richest=ALL_OTHERS)
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
    params = [param for twin in twins for param in twin.params]
    assert all(map(same_bits, flat_state(together)[: len(params)], params))


@pytest.mark.parametrize("name", OURS)
def test_the_databases_errors_are_raised(name):
    for item in INFOS[name].optim_error_inputs_func("cpu", torch.float32):
        given = item.optimizer_error_input
        params = given.params if given.params is not None else Problem().params
        assert item.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR, given.desc
        match = rf"{item.error_regex}|^[a-z_0-9\[\]]+: expected .* got "
        warns = issubclass(item.error_type, Warning)
        with pytest.warns(UserWarning, match=match) if warns else pytest.raises(item.error_type, match=match):
            OURS[name](params, **given.kwargs)


@cases(richest=TORCHS_OWN)
@pytest.mark.parametrize("kind", ["complex", "sparse"])
def test_torchs_implementations_take_what_kernels_refuse_as_torch_does(case, kind):
    param = torch.randn(3, dtype=torch.complex64 if kind == "complex" else torch.float32)
    grad = torch.sparse_coo_tensor([[0, 0, 2]], [0.25, 0.75, -1.0], (3,)) if kind == "sparse" else param.flip(0)
    outcomes = []
    for make, flags in ((case.ours, {}), (case.torchs, {"foreach": case.implementation == "foreach"})):
        stepped = param.clone()
        stepped.grad = grad.clone()
        optimizer = make([stepped], **flags, weight_decay=0)
        try:
            optimizer.step()
            outcomes.append((None, stepped.tolist()))
        except RuntimeError as error:
            outcomes.append((str(error), stepped.tolist()))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("locality", [None, (0.5, 2.0)], ids=["uniform", "local"])
@cases(richest=["differentiable"])
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


@cases(*KERNELS)
def test_a_step_allocates_nothing_that_grows_with_the_parameters(case):
    params = [torch.randn(150, 150) for _ in range(3)]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = case.ours(params)
    for _ in range(2):
        optimizer.step()
    with torch.autograd.profiler.profile(profile_memory=True) as recorded:
        optimizer.step()
    allocated = [event.self_cpu_memory_usage for event in recorded.function_events]
    assert allocated
    assert max(allocated) < params[0].nbytes // 100
