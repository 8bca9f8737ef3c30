"""Selection of a model's convolution weights and their order, and models without any."""

import contextlib
import math

import pytest
import torch
from torch import nn

from loco_ext.analysis import locality_statistics
from loco_ext.analysis.conv_weights import conv_weights
from loco_ext.nn import LocallyConnected2d


class Backwards(nn.Module):
    """Module that registers its layers in another order than it calls them."""

    def __init__(self):
        super().__init__()
        self.second = nn.Sequential(nn.Conv2d(4, 5, 3, padding=1), nn.BatchNorm2d(5), nn.Dropout(0.5))
        self.unused = nn.Conv2d(4, 4, 3)
        self.first = nn.ConvTranspose2d(3, 4, 3)
        self.fail = False

    def forward(self, x, y):
        if self.fail:
            raise RuntimeError("on purpose")
        return self.second(self.first(x) + y)


INPUTS = (torch.ones(2, 3, 8, 8), torch.ones(1))


def test_order_of_registration_and_of_call():
    model = Backwards()
    assert list(conv_weights(model)) == ["second.0", "unused", "first"]
    found = conv_weights(model, INPUTS)
    assert list(found) == ["first", "second.0"]
    assert found["first"].shape == (3, 4, 3, 3)
    lower = {cell.part: cell.matrices for cell in locality_statistics(model, example_inputs=INPUTS).cells}
    assert lower == {"all": 32, "lower": 12, "upper": 20}


class Writing(Backwards):
    def forward(self, x, y):
        return super().forward(x.add_(torch.rand(())), y)


@pytest.mark.parametrize("fail", [False, True])
def test_the_model_the_inputs_and_random_numbers_are_left_as_they_were(fail):
    model, inputs = Writing(), tuple(each.clone() for each in INPUTS)
    model.second[2].eval()
    model.fail = fail
    modes, random_state = [module.training for module in model.modules()], torch.get_rng_state()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="on purpose") if fail else contextlib.nullcontext():
        conv_weights(model, inputs)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(inputs[0], INPUTS[0])
    assert torch.equal(torch.get_rng_state(), random_state)


def test_one_tensor_as_input_and_a_layer_called_twice():
    convolution = nn.Conv2d(3, 3, 3, padding=1)
    other = nn.Conv2d(3, 3, 5, padding=2)
    model = nn.Sequential(convolution, other, nn.Conv2d(3, 3, 1), convolution)
    assert list(conv_weights(model, torch.ones(1, 3, 8, 8))) == ["0", "1"]


@pytest.mark.parametrize("inputs", [None, torch.ones(1, 2, 9, 9)])
def test_shared_weights_count_once_under_their_first_name(inputs):
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3))
    model[2].weight = model[0].weight
    assert list(conv_weights(model, inputs)) == ["0", "1"]


def test_what_counts_in_a_module():
    model = nn.ModuleDict(
        {
            "kept1": nn.Conv1d(2, 4, 15),
            "kept2": nn.Conv2d(4, 4, (1, 7), groups=4),
            "kept3": nn.ConvTranspose3d(2, 4, 3),
            "even": nn.Conv2d(2, 4, 4),
            "half_even": nn.Conv2d(2, 4, (3, 2)),
            "pointwise": nn.Conv2d(2, 4, 1),
            "large": nn.Conv1d(2, 4, 17),
            "complex": nn.Conv2d(2, 4, 3, dtype=torch.complex64),
            "linear": nn.Linear(3, 3),
            "embedding": nn.Embedding(3, 3),
        }
    )
    found = conv_weights(model)
    assert {name: tuple(weight.shape) for name, weight in found.items()} == {
        "kept1": (4, 2, 15),
        "kept2": (4, 1, 1, 7),
        "kept3": (2, 4, 3, 3, 3),
    }
    for weight in found.values():
        assert weight.dtype == torch.float64
        assert not weight.requires_grad


def test_what_counts_in_a_mapping():
    state = {
        "b.conv.weight": torch.randn(4, 3, 3, 3),
        "a.weight": torch.randn(4, 3, 5).half(),
        "weight": torch.randn(2, 2, 3, 3, 3, requires_grad=True),
        "position": torch.randn(1, 3, 3, 3),
        "conv_weight": torch.randn(4, 3, 3, 3),
        "conv.weight.mask": torch.randn(4, 3, 3, 3),
        "counts.weight": torch.ones(4, 3, 3, 3, dtype=torch.int64),
        "linear.weight": torch.randn(4, 4),
        "deep.weight": torch.randn(1, 1, 3, 3, 3, 3),
        "empty.weight": torch.randn(0, 3, 3, 3),
        "none.weight": None,
    }
    assert list(conv_weights(state)) == ["b.conv", "a", ""]


def test_a_module_and_its_state_dict_agree():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.ConvTranspose2d(4, 2, 5), nn.BatchNorm2d(2)))
    ours, theirs = conv_weights(model), conv_weights(model.state_dict())
    assert list(ours) == list(theirs) == ["0", "1.0"]
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert locality_statistics(model) == locality_statistics(model.state_dict())
    model.append(LocallyConnected2d(3, 3, 3, input_size=5))
    assert list(conv_weights(model)) == list(conv_weights(model.state_dict())) == ["0", "1.0"]


@pytest.mark.parametrize("model", [None, torch.ones(3, 3, 3, 3), {0: torch.ones(1, 1, 3)}], ids=range(3))
def test_models_of_another_type(model):
    with pytest.raises(TypeError, match=r"model: expected a module or a mapping of names to tensors, got "):
        locality_statistics(model)


@pytest.mark.parametrize("model", [nn.Conv2d(3, 3, 2), {"model": {"weight": torch.ones(1, 1, 3)}}], ids=range(2))
def test_models_without_such_weights(model):
    with pytest.raises(ValueError, match=r"model: expected a floating-point convolution weight .* odd .* found none"):
        locality_statistics(model)


def test_weights_that_are_lazy_or_on_the_meta_device_or_not_finite():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.LazyConv2d(4, 3))
    with pytest.raises(ValueError, match=r"model: expected initialised weights, those of \['1'\] are lazy"):
        conv_weights(model)
    empty = nn.Sequential(nn.Conv2d(3, 3, 3, device="meta"))
    for arguments in ((empty.state_dict(),), (empty, torch.zeros(1, 3, 3, 3))):
        with pytest.raises(ValueError, match=r"model: expected weights with values, those of \['0'\] are on the meta"):
            conv_weights(*arguments)
    for value in (math.nan, -math.inf):
        model[0].weight.data[2, 1, 2, 0] = value
        with pytest.raises(ValueError, match=r"model: expected finite weights, got NaN or inf in layer '0'"):
            conv_weights(model[:1])
