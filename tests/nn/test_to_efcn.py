"""Tests of relaxing a network's convolutions: the outputs stay the same, and refusals name what stands in the way."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from loco_ext.experiments import models
from loco_ext.nn import LocallyConnected2d, deviation, to_efcn
from loco_ext.nn.locally_connected import LocallyConnectedNd
from tests.tolerances import WITH_CONVOLUTIONS


def paper() -> nn.Sequential:
    """A narrower version of the eFCN paper's network."""
    return nn.Sequential(
        *(nn.ZeroPad2d(2), nn.Conv2d(3, 8, 4, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.ZeroPad2d(2), nn.Conv2d(8, 8, 5), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.ZeroPad2d(1), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(8, 10)),
    )


def volumes() -> nn.Sequential:
    """A network with 1-d layers after 3-d ones."""
    return nn.Sequential(
        *(nn.Conv3d(2, 4, 3, padding=1, groups=2), nn.BatchNorm3d(4), nn.GELU(), nn.Flatten(2)),
        *(nn.Conv1d(4, 3, 5, stride=3, padding=2, padding_mode="circular", bias=False), nn.Flatten(), nn.LazyLinear(5)),
    )


NETWORKS = {
    "resnet18": (models.resnet18, (3, 8, 8)),
    "mobilenet": (models.mobilenet, (3, 32, 32)),
    "paper": (paper, (3, 32, 32)),
    "volumes": (volumes, (2, 4, 3, 5)),
}


def make(name: str, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    x = torch.randn(3, *shape)
    model = build()
    model(x)  # sets the batch norms' statistics and the lazy layers' shapes
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.to(dtype).eval(), x.to(dtype)


def relaxed_layers(model: nn.Module) -> list[LocallyConnectedNd]:
    return [module for module in model.modules() if isinstance(module, LocallyConnectedNd)]


@pytest.mark.parametrize(
    ("name", "dtype"), [("paper", torch.float32), *((name, torch.float64) for name in NETWORKS)], ids=str
)
def test_outputs_stay(name, dtype):
    model, x = make(name, dtype)
    tolerance = WITH_CONVOLUTIONS[dtype]
    before = copy.deepcopy(model.state_dict())
    efcn = to_efcn(model, x[:1])
    expected = model(x)
    torch.testing.assert_close(efcn(x), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())
    convolutions = sum(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
    assert len(relaxed_layers(efcn)) == convolutions
    assert not any(isinstance(module, nn.modules.conv._ConvNd) for module in efcn.modules())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize(("name", "relax"), [("paper", 0), ("volumes", np.int64(1)), ("paper", "all")])
def test_more_pixels_change_nothing_at_first(name, relax):
    model, x = make(name, torch.float64)
    local, efcn = to_efcn(model, x), to_efcn(model, x, relax)
    assert torch.equal(efcn(x), local(x))
    for narrow, wide in zip(relaxed_layers(local), relaxed_layers(efcn), strict=True):
        if relax == "all":
            assert wide.pattern.nnz == wide.pattern.n_in * wide.pattern.n_out
        else:
            assert (wide.pattern.nnz > narrow.pattern.nnz) == (relax == 1)
    assert deviation(efcn).delta_locality == 0


def test_only_the_chosen_layers_change():
    model, x = make("resnet18", torch.float32)
    efcn = to_efcn(model, x, layers=["0", "4.residual"])
    names = {name for name, module in efcn.named_modules() if isinstance(module, LocallyConnected2d)}
    assert names == {"0", "4.residual.0", "4.residual.3"}
    torch.testing.assert_close(efcn(x), model(x))


def test_a_single_convolution_and_flags():
    conv = nn.Conv2d(2, 3, 3, padding="same")
    conv.weight.requires_grad_(False)
    layer = to_efcn(conv, torch.zeros(1, 2, 5, 6))
    assert isinstance(layer, LocallyConnected2d)
    assert (layer.weight.requires_grad, layer.bias.requires_grad, layer.training) == (False, True, True)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.pool = nn.MaxPool2d(2)


def model_of(forward: Callable[..., Any]) -> nn.Module:
    """Return a model that calls its convolution ``conv`` and its pooling ``pool`` as ``forward`` does."""
    return type("Model", (Parts,), {"forward": forward})()


def again(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.conv(self.conv(x))


def choosing(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.conv(x) if x.sum() > 0 else x


def functional(self: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.conv2d(self.conv(x), self.conv.weight)


def normed(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.conv(x) / self.conv.weight.norm()


def listed() -> nn.Module:
    model = model_of(lambda self, x: self.stages["first"][0](x))
    model.stages = {"first": [model.conv]}
    return model


def shared_weight() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1))
    model[1].weight = model[0].weight
    return model


def hooked(kind: str = "forward_hook") -> nn.Module:
    model = nn.Sequential(nn.Conv2d(2, 2, 1))
    getattr(model[0], f"register_{kind}")(lambda *_: None)
    return model


def hidden() -> nn.Module:
    """A model with a hooked module, which to_efcn must not look into."""
    model = nn.Sequential(nn.Conv2d(2, 2, 1), model_of(lambda _, x: nn.functional.conv2d(x, torch.ones(2, 2, 1, 1))))
    model[1].register_forward_hook(lambda *_: None)
    return model


def test_one_layer_called_twice_on_one_size_stays_one():
    model, x = model_of(again).double(), torch.randn(2, 2, 4, 4, dtype=torch.float64)
    efcn = to_efcn(model, x)
    torch.testing.assert_close(efcn(x), model(x), rtol=1e-12, atol=1e-12)
    both = nn.Sequential(model.conv, nn.ReLU(), model.conv)
    efcn = to_efcn(both, x)
    assert efcn[0] is efcn[2]
    torch.testing.assert_close(efcn(x), both(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "make_model",
    [
        lambda: model_of(choosing),
        lambda: model_of(lambda self, x: self.conv(input=x)),
        lambda: model_of(lambda self, x: self.conv(x.to(next(self.parameters()).dtype))),
        lambda: torch.compile(model_of(again), backend="eager"),
    ],
    ids=["choosing", "by name", "reading a dtype", "compiled"],
)
def test_models_that_call_their_convolutions_in_other_ways_are_relaxed(make_model):
    model, x = make_model(), torch.rand(2, 2, 4, 4)
    torch.testing.assert_close(to_efcn(model, x)(x), model(x))


def test_convolutions_that_were_not_chosen_may_do_as_they_like():
    x = torch.randn(2, 2, 4, 4)
    for model in (hidden(), nn.Sequential(nn.Conv2d(2, 2, 1), model_of(normed))):
        efcn = to_efcn(model, x, layers=["0"])
        torch.testing.assert_close(efcn(x), model(x))


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (
            lambda: model_of(lambda self, x: self.pool(self.conv(x)) + self.conv(self.pool(x))),
            r"one input size of conv, got calls with \(2, 2\) and \(4, 4\)",
        ),
        (lambda: model_of(choosing), "one input size of conv, got no call"),
        (lambda: model_of(functional), "convolutions that are modules, got conv2d called by the model"),
        (lambda: nn.Sequential(nn.ReLU(), model_of(functional)), "got conv2d called by 1"),
        (listed, "reached as modules alone, got conv in stages; use an nn.ModuleList"),
        (shared_weight, "got 0.weight is 1.weight"),
        (hooked, "without hooks, got 0"),
        (lambda: hooked("full_backward_pre_hook"), "without hooks, got 0"),
        (hidden, "convolutions that are modules, got conv2d called by 1"),
        (lambda: model_of(lambda self, x: (self.conv(x), self.conv.weight)), "only called, got weight of conv in use"),
        (lambda: nn.Sequential(model_of(normed)), "only called, got weight of 0.conv in use"),
        (lambda: model_of(lambda self, x: self.conv(x) * len(self.conv.bias)), "only called, got bias of conv in use"),
        (lambda: model_of(lambda self, x: self.conv(x) * self.conv.weight.shape[0]), "got weight of conv in use"),
        (lambda: nn.Sequential(nn.ConvTranspose2d(2, 2, 2)), "got 0, a ConvTranspose2d"),
        (lambda: nn.Sequential(nn.LazyConv2d(2, 2)), "got none yet in 0"),
        (lambda: nn.Sequential(parametrizations.weight_norm(nn.Conv2d(2, 2, 1))), "parametrization, got 0"),
        (lambda: nn.Sequential(nn.Conv2d(3, 2, 1)), "expected what the model runs on, got RuntimeError"),
    ],
)
def test_what_is_not_understood_is_named(make_model, message):
    with pytest.raises(ValueError, match=message):
        to_efcn(make_model(), torch.zeros(1, 2, 4, 4))


@pytest.mark.usefixtures("mesh")
def test_a_copy_would_not_be_data_parallel():
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Conv2d(2, 2, 1)))
    with pytest.raises(TypeError, match="model: expected one outside of DistributedDataParallel"):
        to_efcn(model, torch.zeros(1, 2, 4, 4))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"relax": "none"}, ValueError, "relax: expected"),
        ({"relax": -1}, ValueError, "relax: expected"),
        ({"relax": True}, TypeError, "relax: expected"),
        ({"relax": 1.0}, TypeError, "relax: expected"),
        ({"layers": "0"}, TypeError, "layers: expected"),
        ({"layers": ["20"]}, ValueError, "got '20', which the model has not"),
        ({"layers": ["2"]}, ValueError, "got 2"),
        ({"memory_limit": -1}, ValueError, "memory_limit: expected"),
        ({"memory_limit": "1 GB"}, TypeError, "memory_limit: expected"),
        ({"example_inputs": "image"}, TypeError, "example_inputs: expected"),
        ({"model": 3}, TypeError, "model: expected"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    given = {"model": paper(), "example_inputs": torch.zeros(1, 3, 32, 32)} | arguments
    with pytest.raises(error, match=message):
        to_efcn(**given)


def test_memory_is_forecast_before_any_is_taken():
    model, x = make("paper", torch.float32)
    efcn = to_efcn(model, x, "all")
    taken = sum(p.nbytes for layer in relaxed_layers(efcn) for p in layer.parameters())
    to_efcn(model, x, "all", memory_limit=taken)
    with pytest.raises(MemoryError, match=r"relax: expected layers of at most .* MB in all, got .* MB: 1 .* MB, "):
        to_efcn(model, x, "all", memory_limit=taken - 1)
    with pytest.raises(MemoryError, match="GB in all"):
        to_efcn(nn.Conv2d(64, 64, 3, padding=1, device="cpu"), torch.zeros(1, 64, 256, 256), "all")
