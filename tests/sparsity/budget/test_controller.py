"""Budgets while a network trains: the schedule, what is held, resuming, and misuse."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from loco_ext import optim, sparsity
from loco_ext.sparsity.budget import shrink
from tests.covering import covering, slow
from tests.gpu import needs_gpu
from tests.processes import run_ranks
from tests.sparsity.budget.networks import IMAGE, NETWORKS, batches, fake_times, macs, network

X = torch.zeros(2, *IMAGE)


def controlled(
    name: str, device: str = "cpu", **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, sparsity.Budget]:
    model = network(name).train().to(device)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    arguments = {"example_inputs": X.to(device), "macs": 0.4, "begin": 3, "end": 12, "updates": 4, **options}
    return model, optimizer, sparsity.Budget(model, optimizer, **arguments)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, budget: sparsity.Budget, steps: int, seed: int) -> None:
    device = next(model.parameters()).device
    for x, target in batches(steps, seed=seed):
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device)), target.to(device)).backward()
        optimizer.step()
        budget.step()


def reached(name: str, model: nn.Module) -> float:
    return macs(sparsity.compact(model, X, cost="macs", fold_norms=False)[0]) / macs(network(name))


@pytest.mark.parametrize(
    ("name", "way"),
    covering(NETWORKS, [("pruning", "taylor"), ("pruning", "norm"), ("penalty", "taylor")], strength=1),
    ids=str,
)
def test_the_budget_is_reached_by_the_end_and_held(name: str, way: tuple[str, str]) -> None:
    method, importance = way
    model, optimizer, budget = controlled(name, method=method, importance=importance)
    train(model, optimizer, budget, 2, seed=1)
    assert reached(name, model) == 1.0
    train(model, optimizer, budget, 5, seed=2)
    if method == "pruning":
        assert 0.4 < reached(name, model) <= max(budget.share_wanted, 0.6)
    train(model, optimizer, budget, 5, seed=3)
    at_end = reached(name, model)
    assert 0.2 < at_end <= 0.4  # compaction may find more than the budget counts
    zeros = {name: p == 0 for name, p in model.named_parameters()}
    train(model, optimizer, budget, 6, seed=4)
    assert reached(name, model) == at_end
    assert all(bool((p[zeros[name]] == 0).all()) for name, p in model.named_parameters())


@needs_gpu
@pytest.mark.parametrize(("method", "begins_on"), [("pruning", "cuda"), ("penalty", "cuda"), ("pruning", "cpu")])
def test_a_network_on_a_gpu_becomes_as_small_and_is_compacted_there(method: str, begins_on: str) -> None:
    model, optimizer, budget = controlled("residual", begins_on, method=method)
    model.cuda()  # as trainers do with a model that they are given
    train(model, optimizer, budget, 14, seed=1)
    x = torch.randn(2, *IMAGE, device="cuda")
    smaller, _ = sparsity.compact(model.eval(), x, cost="macs")
    found, expected = (each.double()(x.double()) for each in (smaller, copy.deepcopy(model)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert 0.2 < reached("residual", model.cpu()) <= 0.4


@pytest.mark.parametrize(("name", "cost", "share"), [("depthwise", "parameters", 0.5), ("constants", "macs", 0.2)])
def test_what_compaction_cannot_remove_counts(name: str, cost: str, share: float) -> None:
    """Filters of a depthwise layer have one size; constants that padding makes visible keep a channel."""
    model, optimizer, budget = controlled(name, **{"macs": None, cost: share}, granularity="rings", begin=0, end=3)
    train(model, optimizer, budget, 4, seed=1)
    _, report = sparsity.compact(model, X, cost="macs", fold_norms=False)
    after, before = (getattr(report, f"{cost}_{state}") for state in ("after", "before"))
    assert 0.4 * share < after / before <= share


def test_a_frozen_batch_norm_does_not_hide_its_filters() -> None:
    model, optimizer, budget = controlled("plain", granularity="filters", begin=0, end=3)
    model[1].requires_grad_(False)  # type: ignore[index]
    train(model, optimizer, budget, 1, seed=1)
    assert bool((budget.state_dict()["importance"]["0"][:, -1] > 0).all())


def test_a_layer_that_is_frozen_meanwhile_keeps_its_importance() -> None:
    model, optimizer, budget = controlled("plain", begin=4, end=8)
    train(model, optimizer, budget, 2, seed=1)
    before = budget.state_dict()["importance"]
    model[4].requires_grad_(False)  # type: ignore[index]
    train(model, optimizer, budget, 2, seed=2)
    after = budget.state_dict()["importance"]
    assert {name for name in before if torch.equal(before[name], after[name])} == {"4"}


def test_filters_that_go_leave_no_shift_behind() -> None:
    model, optimizer, budget = controlled("plain", granularity="filters", macs=0.3)
    train(model, optimizer, budget, 12, seed=1)
    seen = []
    model[1].register_forward_hook(lambda _, __, output: seen.append(output))  # type: ignore[index]
    for mode in (True, False):
        model.train(mode)(batches()[0][0])
    gone = (model[0].weight == 0).flatten(1).all(1)  # type: ignore[index]
    assert gone.any()
    assert all(not output[:, gone].any() for output in seen)


def test_what_is_left_out_comes_back_with_its_values_if_it_matters_more_again() -> None:
    """All that the first choice keeps becomes tiny, so that the second one prefers other filters of the same layer.

    Between both, slow weights take the place of the zeros, as by a Lookahead optimizer.
    """
    model, _, budget = controlled("plain", importance="norm", granularity="filters", begin=0, end=3, updates=3)
    first = model[0].weight  # type: ignore[index]
    before = first.detach().clone()
    budget.step()
    gone = (first == 0).flatten(1).all(1)
    assert 0 < gone.sum() < len(gone)
    with torch.no_grad():
        first *= 1e-3
        first[gone] = before[gone] / 2
    budget.step()
    back = gone & (first != 0).flatten(1).all(1)
    assert back.any()
    assert torch.equal(first[back], before[back])
    assert len(budget.state_dict()["removed"]) > 0
    budget.step()
    assert budget.state_dict()["removed"] == []


@pytest.mark.parametrize("method", ["pruning", slow("penalty")])
def test_resumed_is_uninterrupted(method: str) -> None:
    model, optimizer, budget = controlled("residual", method=method)
    train(model, optimizer, budget, 6, seed=1)
    saved = copy.deepcopy([each.state_dict() for each in (model, optimizer, budget)])
    train(model, optimizer, budget, 8, seed=2)
    other, its_optimizer, its_budget = controlled("residual", method=method)
    for each, state in zip((other, its_optimizer, its_budget), saved, strict=True):
        each.load_state_dict(state)
    train(other, its_optimizer, its_budget, 8, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_after_an_error_what_was_removed_is_away_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no choice")

    model, optimizer, budget = controlled("plain")
    train(model, optimizer, budget, 8, seed=1)
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr(budget, "_sizes_now", fail)
    with pytest.raises(RuntimeError, match="no choice"):
        budget.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_longer_training_does_not_reopen_a_budget_that_has_ended() -> None:
    model, optimizer, budget = controlled("plain")
    train(model, optimizer, budget, 14, seed=1)
    longer = sparsity.Budget(model, optimizer, example_inputs=X, macs=0.4, begin=10, end=40)
    longer.load_state_dict(budget.state_dict())
    assert (longer.begin, longer.end) == (3, 12)
    state = {name: value for name, value in budget.state_dict().items() if name not in ("begin", "end", "budget")}
    older = sparsity.Budget(model, optimizer, example_inputs=X, macs=0.4, begin=20, end=40)
    older.load_state_dict(state)
    assert older.end == budget.steps
    before = reached("plain", model)
    train(model, optimizer, longer, 30, seed=2)
    assert reached("plain", model) == before


@pytest.mark.parametrize("method", ["pruning", slow("penalty")])
def test_a_latency_is_met(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A quarter of the latency does not depend on the MACs, in place of what compaction measures."""
    fake_times(monkeypatch.setattr, 0.25)
    model, optimizer, budget = controlled("plain", macs=None, latency=0.6, method=method)
    train(model, optimizer, budget, 14, seed=1)
    assert 0.35 < reached("plain", model) <= 0.35 / 0.75  # the penalty may have set more scales to zero
    state = budget.state_dict()
    assert 0.4 < state["target"] < 0.6
    budget.load_state_dict({name: value for name, value in state.items() if name != "round_to"})
    assert budget.state_dict()["round_to"] == 1
    with pytest.raises(ValueError, match="state: expected round_to of at least 1, got 0"):
        budget.load_state_dict(state | {"round_to": 0})
    monkeypatch.setattr(shrink, "compact", lambda *_, **options: sparsity.compact(*_, cost="macs"))
    with pytest.raises(ValueError, match="latency: expected a model of which a smaller one can be timed, got none"):
        controlled("plain", macs=None, latency=0.6)


def rank_of_a_group(rank: int, folder: str) -> None:
    """Train with other gradients in each process, and other latencies; only those of the second one are too high."""
    model, _, budget = controlled("plain", begin=1, updates=11)
    if rank == 1:  # only this process has gradients
        F.cross_entropy(model(X), torch.arange(2)).backward()
    with pytest.raises(RuntimeError, match="step: expected finite gradients, got none for 0, 4, 7"):
        budget.step()
    fake_times(setattr, (0.25, 0.95)[rank], together=1 + rank)
    of_latency = {"macs": None, "latency": 0.6, "method": "penalty"}
    for options, share in (({}, 0.4), (of_latency, 0.35 / 0.75)):
        model, _, budget = controlled("plain", granularity="filters", **options)
        torch.manual_seed(rank)
        for _ in range(13):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            budget.step()
        assert reached("plain", model) <= share
        torch.save(model.state_dict(), f"{folder}/{budget.cost}-{rank}.pt")


@pytest.mark.slow
def test_all_processes_have_the_choice_and_the_error_of_the_first(tmp_path: Path) -> None:
    run_ranks(rank_of_a_group, str(tmp_path), count=2, folder=tmp_path)
    for cost in ("macs", "latency"):
        first, second = (torch.load(tmp_path / f"{cost}-{rank}.pt") for rank in range(2))
        assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_state_of_another_model() -> None:
    _, _, budget = controlled("plain")
    model, optimizer, other = controlled("depthwise")
    train(model, optimizer, other, 1, seed=1)
    with pytest.raises(ValueError, match="state: expected importance of shapes"):
        budget.load_state_dict(other.state_dict())
    state = budget.state_dict()
    sizes = [torch.zeros(count, dtype=torch.int64) for count in (6, 8, 12, 4)]
    for bad, message in (
        ({**state, "sizes": sizes[:1]}, r"state: expected sizes of \[6, 8, 12, 4\] filters, got of \[6\]"),
        ({"steps": 1}, "state: expected one from Budget.state_dict, got one without importance, penalty, removed"),
        ({**state, "steps": "1"}, "state: expected steps as Budget.state_dict returns it, got '1'"),
        ({**state, "target": None}, "state: expected target as Budget.state_dict returns it, got None"),
        ({**state, "importance": {"0": 1.0}}, "state: expected tensors in importance, sizes and removed"),
        ({**state, "removed": [torch.zeros(3)]}, r"state: expected removed values of shapes \[\], got others"),
        ({**state, "steps": -5}, "state: expected steps of at least 0, got -5"),
        ({**state, "end": 2}, "state: expected end of at least 3, got 2"),
        ({**state, "target": math.nan}, r"state: expected a target in \(0, 1\], got nan"),
        ({**state, "budget": ("macs", 0.9)}, r"state: expected one of the budget macs, 0.4, got \('macs', 0.9\)"),
        ({**state, "importance": {"0": torch.tensor(math.nan)}}, "state: expected finite importance"),
        ({**state, "sizes": [each.float() for each in sizes]}, "state: expected sizes in int64, got"),
        ({**state, "sizes": [sizes[0] - 1, *sizes[1:]]}, r"state: expected sizes of \[6, 8, 12, 4\] filters"),
        ({**state, "sizes": [sizes[0] + 1, *sizes[1:]]}, r"state: expected removed values of shapes \[\(6, 3, 5, 5\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            budget.load_state_dict(bad)
    assert budget.steps == 0
    penalty = controlled("plain", method="penalty")[2]
    for bad in ((1.0,), (1.0, math.nan), (-1.0, 0.5), ("1", 0.5)):
        with pytest.raises(ValueError, match="state: expected two finite numbers of at least 0 for penalty, got"):
            penalty.load_state_dict({**penalty.state_dict(), "penalty": bad, "steps": 5})
    assert penalty.steps == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"end": 2}, "end: expected at least begin, 3, got 2"),
        ({"begin": 0, "end": 0}, "end: expected at least 1, got 0"),
        ({"begin": -1}, "begin: expected at least 0, got -1"),
        ({"macs": 0.02, "least": 6}, r"macs: expected at least 0\.\d+, the least reached, got 0.02"),
        ({"macs": None, "latency": 1.5}, "latency: expected a share of the model's own"),
        ({"macs": None, "parameters": 1e-4, "least": 6}, r"parameters: expected at least 0\.\d+, the least reached"),
        ({"updates": 0}, "updates: expected at least 1, got 0"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        controlled("plain", **options)


def test_sharded_models_are_refused(mesh: DeviceMesh) -> None:
    model = fully_shard(network("plain"), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="model: expected parameters that are whole, got sharded ones"):
        sparsity.Budget(model, optimizer, example_inputs=X, macs=0.5, begin=0, end=1)


def test_an_optimizer_has_the_weights_that_may_go() -> None:
    """Another optimizer may have the layers in ``skip``."""
    model = network("plain")
    others = [parameter for name, parameter in model.named_parameters() if not name.startswith("0.")]
    optimizer = torch.optim.SGD(others, lr=0.1)
    options: dict[str, Any] = {"example_inputs": X, "macs": 0.9, "begin": 0, "end": 1}
    with pytest.raises(ValueError, match=r"optimizer: expected one of the model's .*, got one without 0.weight"):
        sparsity.Budget(model, optimizer, **options)
    sparsity.Budget(model, optimizer, **options, skip=["0"])


def test_all_filters_stay_until_gradients_are_finite() -> None:
    model, optimizer, budget = controlled("plain", begin=1, end=4, updates=11)
    model[0].weight.register_hook(lambda gradient: gradient * math.inf if budget.steps < 2 else gradient)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(2, *IMAGE)), torch.arange(2)).backward()
        budget.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    train(model, optimizer, budget, 2, seed=1)
    assert reached("plain", model) <= 0.4


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_gone(set_to_none: bool) -> None:
    model, optimizer, budget = controlled("plain", begin=1, updates=11)
    F.cross_entropy(model(X), torch.arange(2)).backward()
    optimizer.zero_grad(set_to_none)
    with pytest.raises(RuntimeError, match="step: expected finite gradients, got none for 0, 4, 7, 9, or only zeros"):
        budget.step()
