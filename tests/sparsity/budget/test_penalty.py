"""Budgets by a penalty: its prox, its weights, and the strength that follows the schedule."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loco_ext import sparsity
from loco_ext.sparsity.budget.penalty import CostPenalty
from loco_ext.sparsity.budget.structure import structure_of
from tests.sparsity.budget.networks import IMAGE, network

RATE = 0.5
# MACs of a filter of `plain`: its taps at its pixels, and those of the next layer that read its channel. They are
# divided by their mean over the layers; the last layer's outputs stay.
COSTS = torch.tensor([81 * 3 * 25 + 16 * 8 * 9, 16 * 6 * 9 + 16 * 12, 128 + 4], dtype=torch.float64)
FACTORS = (COSTS / COSTS.mean()).tolist()


def penalty_of(model: Any, granularity: str) -> CostPenalty:
    structure = structure_of(model, [torch.zeros(1, *IMAGE, dtype=next(model.parameters()).dtype)], "half", granularity)
    importance = {layer.name: torch.ones(len(layer.module.weight), len(layer.taps)) for layer in structure.layers}
    problem = structure.problem("macs", importance, dict.fromkeys(importance, 1))
    return CostPenalty(structure, problem, torch.optim.SGD(model.parameters(), lr=RATE))


def plain() -> Any:
    model = network("plain").double()
    nn.init.uniform_(model[1].weight, -1.0, 1.0)  # type: ignore[index]
    return model


def lengths(weight: Tensor) -> Tensor:
    return weight.detach().flatten(1).norm(dim=1)


def test_filters_shrink_by_what_they_cost() -> None:
    """The norm's weight is soft-thresholded if it has the filter's length; otherwise the filter is."""
    model = plain()
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    penalty = penalty_of(model, "filters")
    penalty.strength = 0.3
    penalty.shrink()
    thresholds = [RATE * 0.3 * factor for factor in FACTORS]
    gamma = before["1.weight"]
    torch.testing.assert_close(model[1].weight.detach(), gamma.sign() * (gamma.abs() - thresholds[0]).clamp(min=0))
    for name, threshold in zip(("4", "7"), thresholds[1:], strict=True):
        weight = before[f"{name}.weight"]
        factors = (1 - threshold / lengths(weight)).clamp(min=0)
        expected = weight * factors.view(-1, *[1] * (weight.dim() - 1))
        torch.testing.assert_close(model.get_submodule(name).weight.detach(), expected)
    changed = {"1.weight", "4.weight", "7.weight"}
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters() if name not in changed)


def test_rings_shrink_in_the_direction_of_the_filter() -> None:
    model = plain()
    weight, gamma = (p.detach().clone() for p in (model[0].weight, model[1].weight))
    folded = weight * (gamma / lengths(weight)).view(-1, 1, 1, 1)
    penalty = penalty_of(model, "rings")
    penalty.strength = 0.05
    penalty.shrink()
    expected = sparsity.RingPenalty(1.0).prox(folded, RATE * 0.05 * FACTORS[0])
    found = model[0].weight.detach() * (model[1].weight.detach() / lengths(model[0].weight)).view(-1, 1, 1, 1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(lengths(model[0].weight), lengths(weight))
    assert 0 < (expected == 0).double().mean() < 1


@pytest.mark.parametrize("granularity", ["rings", "filters"])
def test_a_step_rounds_only_its_result_to_half_precision(granularity: str) -> None:
    models = [plain().bfloat16()]
    models.append(copy.deepcopy(models[0]).float())
    for model in models:
        penalty = penalty_of(model, granularity)
        penalty.strength = 0.05
        penalty.shrink()
    for found, expected in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(found, expected.bfloat16())


def test_the_strength_is_the_least_that_leaves_the_share() -> None:
    for parts, reached in ((1.0, True), (0.99, False)):
        penalty = penalty_of(plain(), "filters")
        penalty.adjust(0.4, 5)
        penalty.strength *= parts
        for _ in range(5):
            penalty.shrink()
        needed = penalty.strength
        penalty.adjust(0.4, 5)  # the strength falls only if no more than the share is left
        assert (0 < penalty.strength <= needed) is reached


def test_the_strength_rises_where_filters_are_held() -> None:
    penalty = penalty_of(plain(), "filters")
    penalty.adjust(1.0, 5)
    assert penalty.strength == 0  # nothing has to go
    penalty.adjust(0.4, 5)
    needed = penalty.strength
    for times in (2, 4, 8):  # the weights stay as they are, as if gradients held them
        penalty.adjust(0.4, 5)
        assert penalty.strength == times * needed


@pytest.mark.parametrize("method", ["pruning", "penalty"])
def test_a_state_of_the_other_method(method: str) -> None:
    model = network("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"example_inputs": torch.zeros(1, *IMAGE), "macs": 0.5, "begin": 0, "end": 3}
    other = sparsity.Budget(model, optimizer, **options, method="penalty" if method == "pruning" else "pruning")
    with pytest.raises(ValueError, match=f"state: expected one of method '{method}'"):
        sparsity.Budget(model, optimizer, **options, method=method).load_state_dict(other.state_dict())


@torch.no_grad()
def test_what_requires_no_gradient_is_left_alone() -> None:
    model = plain()
    model[1].weight.requires_grad_(False)
    model[4].weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    penalty = penalty_of(model, "filters")
    penalty.strength = 0.3
    penalty.shrink()
    assert [name for name, p in model.named_parameters() if not torch.equal(before[name], p)] == ["7.weight"]
    penalty.adjust(0.2, 1)
    assert penalty.strength > 0
