"""Tests of parameter_groups: every parameter appears once, in the group that its module's type asks for."""

import math

import pytest
import torch
from torch import nn

from loco_ext import optim, sparsity

LOCALITY = (0.5, 2.0)


class Transformer(nn.Module):
    """A model with a position embedding like a 7x7 kernel, a class token, a bare scale, an embedding and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 5, stride=5)
        self.position = nn.Parameter(torch.zeros(1, 8, 7, 7))
        self.token = nn.Parameter(torch.zeros(1, 1, 9))
        self.scale = nn.Parameter(torch.ones(8))
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.loose = nn.MultiheadAttention(8, 2, bias=False, add_bias_kv=True, kdim=3, vdim=5)
        self.norm = nn.LayerNorm(8)


def names(model, groups):
    known = {id(p): name for name, p in model.named_parameters()}
    return [[known[id(p)] for p in group["params"]] for group in groups]


def test_a_network_is_split_by_module_type():
    model = nn.Sequential(
        *(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.PReLU(4), nn.ConvTranspose1d(4, 2, 5, bias=False)),
        *(nn.Linear(2, 2), nn.InstanceNorm2d(3, affine=True), nn.GroupNorm(1, 3), nn.LayerNorm((3, 2)), nn.RMSNorm(3)),
    )
    groups = optim.parameter_groups(model, 0.1, locality=LOCALITY)
    assert names(model, groups) == [
        ["0.weight", "3.weight"],
        ["4.weight"],
        [
            *("0.bias", "1.weight", "1.bias", "2.weight", "4.bias", "5.weight", "5.bias"),
            *("6.weight", "6.bias", "7.weight", "7.bias", "8.weight"),
        ],
    ]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]
    assert [group["locality"] for group in groups] == [[LOCALITY, LOCALITY], None, None]


def test_only_convolutions_get_a_locality_whatever_shape_others_have():
    model = Transformer()
    convolutions, decayed, plain = names(model, optim.parameter_groups(model, 0.1, locality=LOCALITY))
    assert convolutions == ["patches.weight"]
    attention = {"attention.in_proj_weight", "attention.out_proj.weight"}
    loose = {f"loose.{name}" for name in ("k_proj_weight", "q_proj_weight", "v_proj_weight", "out_proj.weight")}
    assert set(decayed) == {*attention, *loose, "embedding.weight", "position", "token"}
    attention = {"attention.in_proj_bias", "attention.out_proj.bias"}
    assert set(plain) == {
        *attention,
        "loose.bias_k",
        "loose.bias_v",
        "norm.bias",
        "norm.weight",
        "patches.bias",
        "scale",
    }


@pytest.mark.parametrize(
    "convolution",
    [nn.Conv1d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 3, groups=4), nn.Conv3d(1, 2, 3), nn.ConvTranspose2d(4, 2, 3)],
    ids=["depthwise_1d", "depthwise_2d", "3d", "transposed"],
)
def test_every_kind_of_convolution_decays_by_its_map(convolution):
    nn.init.ones_(convolution.double().weight)
    convolution.weight.grad = torch.zeros_like(convolution.weight)
    optim.SGD(optim.parameter_groups(convolution, 0.1, locality=LOCALITY), lr=1.0).step()
    decay = 1 - convolution.weight.detach()
    centre, corner = (1,) * (decay.dim() - 2), (0,) * (decay.dim() - 2)
    torch.testing.assert_close(decay.mean().item(), 0.1)
    factor = 2.0 if decay.dim() == 3 else 4.0  # ratio of the corner to the centre; in 1-d the end is only at distance 1
    torch.testing.assert_close(
        decay[(..., *corner)] / decay[(..., *centre)], torch.full(decay.shape[:2], factor).double()
    )


def test_layers_have_localities_of_their_own_in_one_group():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 5)))
    per_layer = {"1.0": (0.7, 1.3), "1.1": (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)}
    groups = optim.parameter_groups(model, 0.1, locality=LOCALITY, per_layer=per_layer)
    assert groups[0]["locality"] == [LOCALITY, (0.7, 1.3), (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)]
    groups = optim.parameter_groups(model, 0.1, LOCALITY, per_layer={"0": None})
    assert groups[0]["locality"] == [None, LOCALITY, LOCALITY]


def test_penalties_may_be_named_layer_by_layer():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.Conv2d(2, 2, 3), nn.ConvTranspose2d(2, 2, 3)))
    rings, kernels = sparsity.RingPenalty(0.1), sparsity.KernelPenalty(0.2)
    assert optim.parameter_groups(model, 0.1, penalty=rings)[0]["penalty"] == [rings, rings, None]
    assert optim.parameter_groups(model, 0.1, penalty={"1.0": kernels})[0]["penalty"] == [None, kernels, None]
    assert optim.parameter_groups(model, 0.1, penalty={"0": rings, "1.0": None})[0]["penalty"] == [rings, None, None]
    assert optim.parameter_groups(model, 0.1, penalty={})[0]["penalty"] is None
    for name in ("1.1", "1", "nothing"):
        with pytest.raises(ValueError, match=r"penalty: expected names of Conv modules of the model, got \['1|not"):
            optim.parameter_groups(model, 0.1, penalty={"0": rings, name: rings})


def test_shared_weights_have_the_entries_of_the_first_owner_that_is_named():
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3))
    model[1].weight = model[0].weight
    first, second = sparsity.RingPenalty(0.1), sparsity.RingPenalty(0.2)
    assert optim.parameter_groups(model, 0.1, penalty={"0": first, "1": second})[0]["penalty"] == [first]
    named = optim.parameter_groups(model, 0.1, penalty={"1": second}, per_layer={"1": LOCALITY})[0]
    assert (named["penalty"], named["locality"]) == ([second], [LOCALITY])


BAD_ARGUMENTS = [
    ({"model": [nn.ReLU()]}, TypeError, "model: expected a module"),
    ({"weight_decay": LOCALITY}, TypeError, r"weight_decay: expected a number, got \(0.5, 2.0\)"),
    ({"weight_decay": math.nan}, ValueError, "weight_decay: expected a finite number"),
    ({"locality": 0.5}, TypeError, "locality: expected None or a tuple of numbers"),
    ({"per_layer": {"0": True}}, TypeError, r"per_layer\['0'\]: expected None or a tuple"),
    ({"per_layer": [LOCALITY]}, TypeError, "per_layer: expected a mapping of module names"),
    ({"penalty": {"0": 0.1}}, TypeError, r"penalty\['0'\]: expected None, a RingPenalty"),
    *(
        ({"per_layer": {"0": LOCALITY, name: LOCALITY}}, ValueError, "per_layer.*expected.*got")
        for name in ("1", "", "x")
    ),
]


@pytest.mark.parametrize(("arguments", "error", "said"), BAD_ARGUMENTS)
def test_bad_arguments_are_named(arguments, error, said):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(2, 2))
    with pytest.raises(error, match=said):
        optim.parameter_groups(**{"model": model, "weight_decay": 0.1, **arguments})


def test_what_acts_on_nothing_is_a_warning():
    with pytest.warns(UserWarning, match="expected a weight_decay above 0 to act on") as warned:
        optim.parameter_groups(nn.Conv2d(1, 2, 3), 0.0, locality=LOCALITY)
    assert warned[0].filename == __file__
    for options in ({"locality": LOCALITY}, {"penalty": sparsity.RingPenalty(0.1)}):
        with pytest.warns(UserWarning, match="expected a model with convolutions"):
            optim.parameter_groups(nn.Linear(2, 2), 0.1, **options)
    with pytest.warns(UserWarning, match="convolutions of more than one tap"):
        optim.parameter_groups(nn.Conv2d(1, 2, 1), 0.1, locality=LOCALITY)


def test_shared_and_frozen_parameters_appear_once():
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    groups = optim.parameter_groups(model, 0.1, locality=LOCALITY)
    found = [id(p) for group in groups for p in group["params"]]
    assert sorted(found) == sorted({id(p) for p in model.parameters()})
    assert groups[0]["locality"] == [LOCALITY]


def test_groups_without_parameters_are_left_out():
    assert len(optim.parameter_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1
    assert optim.parameter_groups(nn.ReLU(), 0.1) == []


def test_a_lazy_module_must_run_first():
    model = nn.Sequential(nn.LazyConv2d(2, 3))
    with pytest.raises(ValueError, match=r"model.*expected.*0\.weight.*lazy"):
        optim.parameter_groups(model, 0.1)
    model(torch.zeros(1, 1, 4, 4))
    assert len(optim.parameter_groups(model, 0.1)) == 2
