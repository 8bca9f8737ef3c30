"""torch's checks of its own optimizers, run on our classes: checkpoints, hooks, memory.

test_db.py lists the checks of TestOptimRenewed that are left out, with the reasons.
"""

import io
import itertools
from copy import deepcopy

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing import assert_close

from tests.optim.db_cases import (
    INFOS,
    KERNELS,
    OURS,
    Case,
    Problem,
    assert_same,
    cases,
    each_optimizer,
    flat_state,
)

pytestmark = pytest.mark.usefixtures("native", "one_thread")

EVERY = ("default",)  # states are made, saved and loaded alike whatever steps them


def trained(case: Case, **changes):
    """Return a problem and its optimizer after a few steps."""
    problem = Problem()
    optimizer = case.ours(problem.params, **changes)
    problem.run(optimizer, 3)
    return problem, optimizer


def assert_goes_on_alike(problem, optimizer, other_problem, other) -> None:
    problem.run(optimizer, 3)
    other_problem.run(other, 3)
    assert_same(flat_state(optimizer), flat_state(other))


@cases(every=EVERY)
def test_checkpoints_from_before_a_flag_existed_load(case):
    for flag in (*INFOS[case.name].not_og_supported_flags, "locality", "norm", "state_dtype", "stochastic_rounding"):
        problem, optimizer = trained(case)
        saved = deepcopy(optimizer.state_dict())
        if flag not in saved["param_groups"][0]:
            continue  # this optimizer has no such argument
        for group in saved["param_groups"]:
            del group[flag]
        optimizer.load_state_dict(saved)
        problem.run(optimizer, 1)


@cases(every=EVERY)
def test_checkpoints_with_the_step_as_a_number_load(case):
    problem, optimizer = trained(case)
    saved = deepcopy(optimizer.state_dict())
    if case.name == "SGD":
        assert all("step" not in state for state in saved["state"].values())
        return
    for state in saved["state"].values():
        state["step"] = state["step"].item()
    twin = problem.twin()
    loaded = case.ours(twin.params)
    loaded.load_state_dict(saved)
    assert_goes_on_alike(problem, optimizer, twin, loaded)


@cases(every=EVERY)
def test_checkpoints_survive_a_file_without_code(case):
    problem, optimizer = trained(case)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    untouched = deepcopy(saved)
    assert_same(saved, optimizer.state_dict())
    twin = problem.twin()
    loaded = case.ours(twin.params)
    loaded.load_state_dict(saved)
    assert_same(saved, untouched)
    assert_goes_on_alike(problem, optimizer, twin, loaded)
    assert_same(loaded.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("from_torch", [True, False], ids=["from_torch", "to_torch"])
@cases(*KERNELS, "reference", "foreach", every=EVERY)
def test_checkpoints_are_exchanged_with_torch(case, from_torch):
    problem = Problem(torch.float64)
    twin = problem.twin()
    ours, torchs = case.ours(problem.params), case.torchs(twin.params)
    problem.run(ours, 3)
    twin.run(torchs, 3)
    if from_torch:
        ours.load_state_dict(deepcopy(torchs.state_dict()))
    else:
        torchs.load_state_dict(deepcopy(ours.state_dict()))
    problem.run(ours, 3)
    twin.run(torchs, 3)
    assert_close(problem.params, twin.params)


@cases(every=EVERY)
def test_named_and_unnamed_checkpoints_load_into_one_another(case):
    def params(problem, named):
        return [("weight", problem.weight), ("bias", problem.bias)] if named else problem.params

    for saved_names, loaded_names in itertools.product((True, False), repeat=2):
        problem = Problem()
        optimizer = case.ours(params(problem, saved_names))
        problem.run(optimizer, 3)
        twin = problem.twin()
        loaded = case.ours(params(twin, loaded_names))
        loaded.load_state_dict(deepcopy(optimizer.state_dict()))
        assert ("param_names" in loaded.state_dict()["param_groups"][0]) == (saved_names or loaded_names)
        assert_goes_on_alike(problem, optimizer, twin, loaded)


@cases(every=EVERY)
def test_printing_shows_class_groups_and_arguments(case):
    optimizer = case.ours([{"params": [torch.zeros(3)]}, {"params": [torch.zeros(2)], "lr": 0.25}])
    text = repr(optimizer)
    assert text.startswith(f"{case.name} (")
    assert "Parameter Group 1" in text
    for key in ("lr: 0.25", "locality: None", "norm: l2"):
        assert key in text


@each_optimizer
def test_step_hooks_run_in_order_once_each_and_stop_when_removed(name):
    problem, seen = Problem(), []
    optimizer = OURS[name](problem.params)

    def before(given, args, kwargs):
        assert given is optimizer
        seen.append(("before", problem.weight.clone()))

    def after(given, args, kwargs):
        seen.append(("after", problem.weight.clone()))

    everywhere = [
        register_optimizer_step_pre_hook(lambda *_: seen.append(("global before", None))),
        register_optimizer_step_post_hook(lambda *_: seen.append(("global after", None))),
    ]
    own = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    try:
        optimizer.step(problem.closure)
    finally:
        for handle in (*everywhere, *own):
            handle.remove()
    assert [label for label, _ in seen] == ["global before", "before", "after", "global after"]
    assert not torch.equal(seen[1][1], seen[2][1])
    optimizer.step(problem.closure)
    assert len(seen) == 4


@each_optimizer
def test_a_step_hook_may_change_the_arguments(name):
    problem = Problem()
    optimizer = OURS[name](problem.params)
    optimizer.register_step_pre_hook(lambda _, args, kwargs: ((args[0], problem.closure), {}))
    assert optimizer.step() is not None


@each_optimizer
def test_state_dict_hooks_run_in_order_and_may_replace_the_result(name):
    optimizer, seen = OURS[name](Problem().params), []
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("pre"))
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("first pre"), prepend=True)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mark": 1})
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append(set(state)), prepend=True)
    saved = optimizer.state_dict()
    assert seen == ["first pre", "pre", {"state", "param_groups"}]
    assert saved["mark"] == 1


@each_optimizer
def test_load_hooks_run_in_order_and_may_replace_the_checkpoint(name):
    optimizer, seen = OURS[name](Problem().params), []

    def replaces(_, state):
        seen.append("pre")
        state = deepcopy(state)
        state["param_groups"][0]["lr"] = 0.125
        return state

    optimizer.register_load_state_dict_pre_hook(replaces)
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("first pre"), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda given: seen.append(given.param_groups[0]["lr"]))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("first post"), prepend=True)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["first pre", "pre", "first post", 0.125]
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["first pre", "pre", "first post", 0.125] * 2
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 2  # our own hooks are removed again


@each_optimizer
def test_a_load_hook_may_replace_the_states(name):
    kwargs = {"momentum": 0.9} if name == "SGD" else {}
    problem = Problem()
    optimizer = OURS[name](problem.params, **kwargs)
    problem.run(optimizer, 1)
    key = "momentum_buffer" if name == "SGD" else "exp_avg"

    def replaces(_, state):
        state = deepcopy(state)
        state["state"][0][key].fill_(7)
        return state

    optimizer.register_load_state_dict_pre_hook(replaces)
    optimizer.load_state_dict(optimizer.state_dict())
    assert (optimizer.state[problem.weight][key] == 7).all()


@cases(
    reference="it is for being right, with temporary tensors",
    foreach="torch's own makes copies",
    differentiable="autograd keeps copies",
)
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
