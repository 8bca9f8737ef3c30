"""Convolutions whose weights are computed: locality and penalties act on them, or say that they cannot."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import loco_ext
from loco_ext import optim, sparsity
from loco_ext.analysis.conv_weights import conv_weights
from tests.compaction.computed_weights import WAYS

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
LOCALITY = (0.5, 2.0)
BY_TAP = {name: way for name, way in WAYS.items() if name != "orthogonal"}
MIXED = {"orthogonal": WAYS["orthogonal"], "rows": lambda module: parametrizations.weight_norm(module, dim=2)}
PENALTY = sparsity.RingPenalty(0.1)


def weight_of(model):
    model.eval()(torch.zeros(1, 2, 5, 5).double())  # hooks compute weights in a forward
    return model[0].weight.detach().clone()


@pytest.mark.parametrize("compute", BY_TAP.values(), ids=BY_TAP)
@pytest.mark.parametrize("named", [False, True], ids=["all", "per layer"])
def test_decay_changes_the_ratios_of_taps_by_the_map(compute, named):
    model = nn.Sequential(nn.Conv2d(2, 4, 3)).double()
    compute(model[0])
    before = weight_of(model)
    options = {"per_layer": {"0": LOCALITY}} if named else {"locality": LOCALITY}
    optimizer = optim.SGD(optim.parameter_groups(model, 0.1, **options), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = weight_of(model)
    mean = (0.5 + 4 * (1 + 2.0)) / 9
    centre, corner = 1 - 0.1 * 0.5 / mean, 1 - 0.1 * 2.0 / mean
    one, other = (after[..., 0, 0] * before[..., 1, 1] * centre, after[..., 1, 1] * before[..., 0, 0] * corner)
    assert one.any()
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("compute", MIXED.values(), ids=MIXED)
def test_a_locality_that_cannot_act_is_an_error_by_name_and_else_a_warning(compute):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3))
    compute(model[0])
    with pytest.raises(ValueError, match=r"per_layer: expected .* got '0', whose weight .* computes; remove_param"):
        optim.parameter_groups(model, 0.1, per_layer={"0": LOCALITY})
    with pytest.warns(UserWarning, match=r"locality: expected .* got \['0'\]"):
        groups = optim.parameter_groups(model, 0.1, locality=LOCALITY)
    assert len(groups[0]["params"]) == 1
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


@pytest.mark.parametrize("compute", WAYS.values(), ids=WAYS)
def test_a_penalty_without_a_minimum_is_an_error_that_names_the_layer(compute):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    compute(model[0])
    penalty = sparsity.FoldedPenalty(PENALTY, model[1]) if compute is WAYS["pruning"] else PENALTY
    for penalties in (penalty, {"0": penalty}):
        with pytest.raises(ValueError, match=r"penalty: expected .* for '0', whose weight .* computes"):
            optim.parameter_groups(model, 0.1, penalty=penalties)
    assert optim.parameter_groups(model, 0.1, penalty={"2": PENALTY})[0]["penalty"][-1] == PENALTY
    nn.init.zeros_(model[1].weight)
    before = copy.deepcopy(model.state_dict())
    for call in (
        lambda: sparsity.folded_penalties(model, PENALTY),
        lambda: sparsity.complexity_penalties(model, (torch.zeros(1, 2, 5, 5),), 0.1),
        lambda: sparsity.max_strength(model, lambda model: model(torch.ones(1, 2, 5, 5)).sum(), PENALTY),
        lambda: sparsity.zero_dead_filters(model),
    ):
        with pytest.raises(ValueError, match=r"model: expected .* got '0', whose weight .* computes"):
            call()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("compute", WAYS.values(), ids=WAYS)
def test_weights_are_read_as_the_parameters_make_them(compute):
    """A hook leaves the weight of the last forward, and spectral norm goes on whenever it is read in training."""
    conv = nn.Conv2d(2, 4, 3).double()
    compute(conv)
    trained = copy.deepcopy(conv.state_dict())
    for parameter in conv.parameters():
        nn.init.normal_(parameter)
    weight_of(nn.Sequential(conv))
    conv.train().load_state_dict(trained)
    layer = loco_ext.nn.LocallyConnected2d.from_conv(conv, 5)
    found = conv_weights(conv)[""]
    assert all(torch.equal(tensor, trained[name]) for name, tensor in conv.state_dict().items())
    expected = weight_of(nn.Sequential(conv))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(layer.to_conv().weight.detach(), expected)


def test_a_penalty_of_a_pruned_weight_leads_to_the_minimum_of_what_is_left():
    model = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False)).double()
    prune.random_unstructured(model[0], "weight", 0.4)
    target, mask = torch.randn(3, 2, 3, 3).double(), model[0].weight_mask
    optimizer = optim.SGD(optim.parameter_groups(model, 0.0, penalty=sparsity.RingPenalty(0.5)), lr=0.5)
    for _ in range(60):
        model[0].weight_orig.grad = mask * (model[0].weight_orig.detach() * mask - target)
        optimizer.step()
    expected = sparsity.RingPenalty(0.5).prox(target * mask, 1.0)
    assert (expected == 0).any()
    torch.testing.assert_close(weight_of(model), expected)


@pytest.mark.filterwarnings("error")
def test_a_weight_that_is_a_buffer_is_nothing_to_train():
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3))
    weight = model[0].weight.detach()
    del model[0].weight
    model[0].register_buffer("weight", weight)
    (convolutions, _) = optim.parameter_groups(model, 0.1, LOCALITY, penalty=PENALTY)
    assert convolutions["params"] == [model[1].weight]


def test_computed_weights_that_nothing_acts_on_are_grouped_as_any_other():
    model = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(2, 4, 3)), nn.Conv2d(4, 2, 3))
    original = model[0].parametrizations.weight.original1
    plain, local = optim.parameter_groups(model, 0.1), optim.parameter_groups(model, 0.1, LOCALITY)
    assert [original in set(group["params"]) for group in plain] == [False, True, False]
    assert [original in set(group["params"]) for group in local] == [True, False, False]
