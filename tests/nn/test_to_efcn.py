"""Tests of relaxing a network's convolutions: the outputs stay the same, and refusals name what stands in the way."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from loco_ext.experiments import models
from loco_ext.nn import LocallyConnected2d, deviation, to_efcn
from loco_ext.nn.locally_connected import LocallyConnectedNd


def alexnet() -> nn.Sequential:
    """A small AlexNet, which ends in a flattening and linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(8, 12, 3, padding=1)),
        *(nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(12 * 5 * 5, 16), nn.ReLU(), nn.Linear(16, 10)),
    )


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


def vgg() -> nn.Sequential:
    """A narrow VGG: pairs of convolutions with batch norms."""
    layers: list[nn.Module] = []
    for before, width in ((3, 8), (8, 8), (8, 16), (16, 16)):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)] if before == width else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 4 * 4, 10))


NETWORKS = {
    "vgg": (vgg, (3, 16, 16)),
    "vgg13": (models.vgg13, (3, 32, 32)),
    "resnet18": (models.resnet18, (3, 8, 8)),
    "plain8": (lambda: models.cifar_plain(blocks=1), (3, 16, 16)),
    "mobilenet": (models.mobilenet, (3, 32, 32)),
    "alexnet": (alexnet, (3, 24, 24)),
    "paper": (paper, (3, 32, 32)),
    "volumes": (volumes, (2, 4, 3, 5)),
}
LARGE = {"vgg13"}
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in NETWORKS]


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


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_stay(name, dtype, tolerance):
    model, x = make(name, dtype)
    before = copy.deepcopy(model.state_dict())
    efcn = to_efcn(model, x[:1])
    expected = model(x)
    torch.testing.assert_close(efcn(x), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())
    convolutions = sum(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
    assert len(relaxed_layers(efcn)) == convolutions
    assert not any(isinstance(module, nn.modules.conv._ConvNd) for module in efcn.modules())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("relax", [0, np.int64(1), "all"])
@pytest.mark.parametrize("name", ["alexnet", "paper", "volumes"])
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


def test_an_efcn_trains_and_leaves_the_convolution():
    model, x = make("paper", torch.float64)
    efcn = to_efcn(model, x, "all").train()
    optimizer = torch.optim.SGD(efcn.parameters(), lr=0.01)
    y = torch.tensor([1, 2, 3])
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(efcn(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert deviation(efcn).delta_locality > 0


@pytest.mark.slow
def test_efcns_are_copied_saved_compiled_and_exported():
    model, x = make("alexnet", torch.float64)
    efcn = to_efcn(model, x, 1)
    with torch.no_grad():
        for parameter in efcn.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    expected = efcn(x)
    other = to_efcn(model, x, 1)
    other.load_state_dict(efcn.state_dict())
    assert torch.equal(other(x), expected)
    assert torch.equal(copy.deepcopy(efcn)(x), expected)
    compiled = torch.compile(efcn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(torch.export.export(efcn, (x,)).module()(x), expected)


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


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.conv(x)) + self.conv(self.pool(x))


class Again(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.conv(x))


class Choosing(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) if x.sum() > 0 else x


class Functional(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(self.conv(x), self.conv.weight)


class Normed(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) / self.conv.weight.norm()


class Returning(Twice):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.conv(x), self.conv.weight


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, self.weight)


class Idle(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(x)


class ByName(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(input=x)


class Listed(Twice):
    def __init__(self) -> None:
        super().__init__()
        self.stages = {"first": [self.conv]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stages["first"][0](x)


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
    model = nn.Sequential(nn.Conv2d(2, 2, 1), Bare())
    model[1].register_forward_hook(lambda *_: None)
    return model


def test_one_layer_called_twice_on_one_size_stays_one():
    model, x = Again().double(), torch.randn(2, 2, 4, 4, dtype=torch.float64)
    efcn = to_efcn(model, x)
    torch.testing.assert_close(efcn(x), model(x), rtol=1e-12, atol=1e-12)
    both = nn.Sequential(model.conv, nn.ReLU(), model.conv)
    efcn = to_efcn(both, x)
    assert efcn[0] is efcn[2]
    torch.testing.assert_close(efcn(x), both(x), rtol=1e-12, atol=1e-12)


def test_models_may_read_the_dtype_of_their_parameters():
    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3)

        def forward(self, x):
            return self.conv(x.to(next(self.parameters()).dtype))

    model, x = Casting().double(), torch.randn(2, 2, 5, 6)
    torch.testing.assert_close(to_efcn(model, x)(x), model(x))


def test_models_that_choose_by_their_inputs_and_compiled_ones_are_relaxed():
    x = torch.rand(2, 2, 4, 4)
    for model in (Choosing(), ByName(), torch.compile(Again(), backend="eager")):
        torch.testing.assert_close(to_efcn(model, x)(x), model(x))


def test_convolutions_that_were_not_chosen_may_do_as_they_like():
    x = torch.randn(2, 2, 4, 4)
    for model in (hidden(), nn.Sequential(nn.Conv2d(2, 2, 1), Normed())):
        efcn = to_efcn(model, x, layers=["0"])
        torch.testing.assert_close(efcn(x), model(x))


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (Twice, r"one input size of conv, got calls with \(2, 2\) and \(4, 4\)"),
        (Choosing, "one input size of conv, got no call"),
        (Functional, "convolutions that are modules, got conv2d called by the model"),
        (lambda: nn.Sequential(nn.ReLU(), Functional()), "got conv2d called by 1"),
        (Idle, "one input size of conv, got no call"),
        (Listed, "reached as modules alone, got conv in stages; use an nn.ModuleList"),
        (shared_weight, "got 0.weight is 1.weight"),
        (hooked, "without hooks, got 0"),
        (lambda: hooked("full_backward_pre_hook"), "without hooks, got 0"),
        (hidden, "convolutions that are modules, got conv2d called by 1"),
        (Normed, "convolutions that are only called, got weight of conv in use"),
        (Returning, "convolutions that are only called, got weight of conv in use"),
        (lambda: nn.Sequential(Normed()), "convolutions that are only called, got weight of 0.conv in use"),
        (lambda: nn.Sequential(nn.ConvTranspose2d(2, 2, 2)), "got 0, a ConvTranspose2d"),
        (lambda: nn.Sequential(nn.LazyConv2d(2, 2)), "got none yet in 0"),
        (lambda: nn.Sequential(parametrizations.weight_norm(nn.Conv2d(2, 2, 1))), "parametrization, got 0"),
        (lambda: nn.Sequential(nn.Conv2d(3, 2, 1)), "expected what the model runs on, got RuntimeError"),
    ],
)
def test_what_is_not_understood_is_named(make_model, message):
    with pytest.raises(ValueError, match=message):
        to_efcn(make_model(), torch.zeros(1, 2, 4, 4))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"relax": "none"}, ValueError, "relax: expected"),
        ({"relax": -1}, ValueError, "relax: expected"),
        ({"relax": True}, TypeError, "relax: expected"),
        ({"relax": 1.0}, TypeError, "relax: expected"),
        ({"layers": "0"}, TypeError, "layers: expected"),
        ({"layers": ["10"]}, ValueError, "got '10', which the model has not"),
        ({"layers": ["1"]}, ValueError, "got 1"),
        ({"memory_limit": -1}, ValueError, "memory_limit: expected"),
        ({"memory_limit": "1 GB"}, TypeError, "memory_limit: expected"),
        ({"example_inputs": "image"}, TypeError, "example_inputs: expected"),
        ({"model": 3}, TypeError, "model: expected"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    given = {"model": alexnet(), "example_inputs": torch.zeros(1, 3, 24, 24)} | arguments
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
