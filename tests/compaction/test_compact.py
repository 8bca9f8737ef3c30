"""Compaction: smaller networks with the same outputs, at every size of the input."""

import contextlib
import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, fx, nn
from torch.optim.swa_utils import AveragedModel

from loco_ext import sparsity
from loco_ext.experiments import models
from loco_ext.sparsity.compaction.rewrite import Rewriter
from tests.compaction.cases import (
    Network,
    Residual,
    Two,
    compacted,
    conv,
    random_case,
    random_network,
    same,
    sizes_of,
    strike,
)
from tests.covering import covering, slow


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("seeds", [range(9), slow(range(1000, 1060))], ids=str)
def test_random_networks_give_the_same_outputs(seeds: range) -> None:
    for seed in seeds:
        with contextlib.suppress(pytest.skip.Exception):
            model, inputs, _ = random_case(seed, 1 + seed % 3)
            before = copy.deepcopy(model.state_dict())
            fold_norms, fixed_size = ((True, False), (False, False), (False, True))[seed // 3 % 3]
            given = inputs[:1] if fixed_size else inputs
            _, report = compacted(model, *given, fold_norms=fold_norms, fixed_size=fixed_size)
            assert "model" not in report.notes
            assert report.macs_after <= report.macs_executed <= report.macs_before
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("small", {}), slow(("mobilenet", {})), slow(("resnet18", {"dead": 0}))],
)
def test_networks_of_the_experiments(name: str, pattern: dict[str, float]) -> None:
    model = strike(models.MODELS[name].make(3, 10, 32), **pattern).double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.double)
    network, report = compacted(model, x, x.contiguous(memory_format=torch.channels_last))
    assert report.macs_executed < 0.97 * report.macs_before
    assert report.parameters_after == sum(p.numel() for p in network.parameters()) < report.parameters_before
    assert not report.notes


# Biases of the first layer's dead filters, whether its activation is tanh, the second layer's padding, whether the size
# is fixed, and the number of channels that are left between the layers.
CONSTANTS = {
    "goes into the bias": ([2.0], False, 0, False, 2),
    "is shown by the padding": ([2.0], False, 1, False, 3),
    "stands for all that the padding shows": ([0.5, 2.0, -1.0, 1e-9], False, 1, False, 3),
    "becomes a map": ([2.0], False, 1, True, 2),
    "is zero": ([-2.0], True, 1, False, 2),
}


@pytest.mark.parametrize("case", CONSTANTS)
def test_a_constant(case: str) -> None:
    biases, rectified, padding, fixed_size, left = CONSTANTS[case]
    count = len(biases)
    first, second = torch.randn(count + 2, 2, 1, 1).double(), torch.randn(2, count + 2, 3, 3).double()
    first[:count] = 0
    activation = nn.ReLU() if rectified else nn.Tanh()
    model = nn.Sequential(conv(first, [*biases, 0.0, 0.0]), activation, conv(second, padding=padding))
    x, other = torch.randn(1, 2, 6, 7).double(), torch.randn(2, 2, *((6, 7) if fixed_size else (3, 4))).double()
    network, report = compacted(model, x, other, fixed_size=fixed_size)
    assert sizes_of(network) == [(left, 2, 1, 1), (2, left, 3, 3)]
    assert ("padding of 2" in str(report.layers[0].kept)) == (left == 3)
    if fixed_size:
        with pytest.raises(RuntimeError, match="size"):
            network(torch.randn(1, 2, 5, 7).double())


@pytest.mark.parametrize(
    ("mode", "stride", "kept"),
    covering(["zeros", "reflect", "replicate", "circular"], [1, 2, 3], [(0, 0), (0, 4), (4, 4), (3, 1), (2, 2)]),
    ids=str,
)
def test_a_filter_of_one_tap_reads_the_right_place(mode: str, stride: int, kept: tuple[int, int]) -> None:
    weight = torch.zeros(1, 1, 5, 5).double()
    weight[0, 0, kept[0], kept[1]] = 1
    model = conv(weight, stride=stride, padding=2, padding_mode=mode)
    network, report = compacted(model, torch.randn(1, 1, 9, 9).double())
    assert sizes_of(network) == [(1, 1, 1, 1)]
    smaller_than_what_is_cropped = [(1, 1), (2, 1)] if mode == "zeros" else []
    for size in ((9, 8), (3, 4), (12, 3), *smaller_than_what_is_cropped):
        x = torch.randn(2, 1, *size).double()
        assert torch.equal(network(x), model(x))
    assert report.layers[0].sizes == {"1x1": 1}


def test_a_block_that_adds_nothing_becomes_the_identity_and_a_channel_goes_if_every_writer_is_dead() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), *models.basic_block(4, 4, 1, 3), nn.Conv2d(4, 2, 1)).double().eval()
    x, last = torch.randn(2, 3, 5, 5).double(), model[1].residual[3].weight
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = 0, 0
        last[:2] = 0
    assert sizes_of(compacted(model, x)[0]) == [(3, 3, 1, 1), (4, 3, 3, 3), (2, 4, 3, 3), (2, 3, 1, 1)]
    nn.init.zeros_(last)
    nn.init.ones_(model[0].weight)
    network, report = compacted(model, x)
    assert sizes_of(network) == [(4, 3, 1, 1), (2, 4, 1, 1)]
    assert [layer.filters_after for layer in report.layers] == [4, 0, 0, 2]
    assert report.macs_after == 25 * (12 + 8)


def test_macs_are_those_of_eq_10() -> None:
    weight = torch.randn(5, 3, 3, 3)
    weight[0] = 0
    weight[1, :, 0] = weight[1, :, :, 0] = 0
    weight[2, :, [0, 2]] = 0
    weight[2, :, :, [0, 2]] = 0
    weight[3] = 0
    weight[3, 1, 1, 1] = 1  # an identity
    _, report = compacted(conv(weight.double(), padding=1, stride=2), torch.randn(7, 3, 9, 8).double())
    pixels = 5 * 4
    assert report.macs_before == pixels * 5 * 3 * 9
    assert report.macs_after == pixels * 3 * (0 + 4 + 1 + 1 + 9)
    (layer,) = report.layers
    assert layer.sizes == {"3x3": 1, "2x2": 1, "1x1": 2, "0": 1}
    assert (layer.filters_after, layer.identity_filters) == (4, 1)


def test_features_of_channels_that_are_gone_leave_the_linear_layer() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        x = net.convolution(x)
        return net.linear(x.view(x.size(0), -1))

    model = Network(function, convolution=nn.Conv2d(1, 6, 3), linear=nn.Linear(6 * 4 * 5, 3)).double()
    with torch.no_grad():
        model.convolution.weight[2:4] = 0
        model.linear.weight[:, 20:40] = 0
    network, report = compacted(model, torch.randn(2, 1, 6, 7).double())
    assert network.linear.weight.shape == (3, 60)
    assert report.layers[1].macs_after == 180


def test_nan_and_infinite_weights_stay() -> None:
    model = strike(models.small_cnn(3, 4, 8), 0).double().eval()
    with torch.no_grad():
        model[1].bias[:4] = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0]).double()
        model[3].weight[5, 2, 1, 1] = float("nan")
    x = torch.randn(2, 3, 8, 8).double()
    network, _ = sparsity.compact(model, x, cost="macs", fold_norms=False)
    assert torch.equal(network(x).isnan(), model(x).isnan())


def test_the_smaller_network_trains_and_compiles() -> None:
    model = strike(models.small_cnn(3, 4, 8), 0).train()
    x = torch.randn(4, 3, 8, 8)
    network, _ = sparsity.compact(model, x, cost="macs", fold_norms=False)
    assert network.training
    assert model.training
    compiled = torch.compile(copy.deepcopy(network).eval(), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model.eval()(x), rtol=1e-4, atol=1e-5)
    network(x).sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_no_narrow_convolution_of_one_tap_has_a_stride() -> None:
    """The backward of such a convolution writes out of bounds in oneDNN; a crash here is that defect."""
    model = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(24, 16, 1, 2)).double()
    model[0].weight.data[:20] = 0
    x = torch.randn(8, 3, 16, 16, dtype=torch.float64)
    network, _ = compacted(model, x, x[:1, :, :7, :9])
    layer = network.get_submodule("2")
    assert (layer.weight.shape, layer.stride) == ((16, 4, 1, 1), (1, 1))
    model(x).square().mean().backward()
    network.float()(x.float().contiguous(memory_format=torch.channels_last)).square().mean().backward()
    torch.testing.assert_close(layer.weight.grad, model[2].weight.grad[:, 20:].float())


@pytest.mark.parametrize("with_norm", [False, True])
def test_weights_and_biases_are_frozen_on_their_own(with_norm: bool) -> None:
    """A bias that a norm makes trains as the weight does."""
    norms = [nn.BatchNorm2d(8)] if with_norm else []
    first = nn.Conv2d(3, 8, 3, bias=not with_norm)
    model = nn.Sequential(first, *norms, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4))
    second, last = model[-3], model[-1]
    for frozen in (second.weight, last.weight, *([] if with_norm else [first.bias])):
        frozen.requires_grad_(False)
    network, _ = sparsity.compact(strike(model, 0), torch.randn(2, 3, 8, 8), cost="macs")
    trains = [(m.weight.requires_grad, m.bias.requires_grad) for m in network.modules() if hasattr(m, "kernel_size")]
    assert (trains[0], trains[-1]) == ((True, with_norm), (False, True))
    head = network.get_submodule(str(len(model) - 1))
    assert (head.weight.requires_grad, head.bias.requires_grad) == (False, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = strike(models.cifar_resnet(3, 10, 8, blocks=1), 4).to(dtype).eval()
    x = torch.randn(2, 3, 8, 8).to(dtype)
    network, _ = sparsity.compact(model, x, cost="macs", fold_norms=False)
    same(network, model, x, tolerance=1e-5 if dtype == torch.float32 else 0.05)


def described() -> str:
    """Return the code and the shapes of a random network's smaller network."""
    torch.manual_seed(3)
    network, _ = sparsity.compact(random_network(7, 2), torch.randn(2, 3, 12, 11).double(), cost="macs")
    return f"{network.code}{[tuple(p.shape) for p in network.parameters()]}"


@pytest.mark.slow
def test_the_same_network_whatever_the_process() -> None:
    """The order of sets of strings depends on the process."""
    code = "from tests.compaction.test_compact import described; print(described(), end='')"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=120) == described()


def test_wrappers_are_taken_off() -> None:
    model = strike(models.small_cnn(3, 4, 8), 0).double().eval()
    x = torch.randn(2, 3, 8, 8).double()
    expected = sum(p.numel() for p in compacted(model, x)[0].parameters())
    wrappers = nn.DataParallel(model), torch.compile(model, backend="eager"), AveragedModel(model)
    x = x.to(next(model.parameters()).device)  # to which DataParallel moves the model
    for wrapped in wrappers:
        assert sum(p.numel() for p in compacted(wrapped, x)[0].parameters()) == expected


def test_a_model_of_nested_outputs_and_several_inputs() -> None:
    def function(net: Network, x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        x, y = net.one(x), net.other(y)
        return {"both": (x + y, x)}

    model = strike(Two(function, one=nn.Conv2d(2, 4, 3), other=nn.Conv2d(3, 4, 3)), 5).double().eval()
    compacted(model, (torch.randn(2, 2, 6, 6).double(), torch.randn(2, 3, 6, 6).double()))


def test_bad_arguments_are_named() -> None:
    model, x = nn.Conv2d(1, 1, 3), torch.zeros(1, 1, 4, 4)
    with pytest.raises(TypeError, match=r"model: expected a module, got str"):
        sparsity.compact("model", x)
    with pytest.raises(ValueError, match=r"cost: expected one of 'measured', 'macs', got 'fast'"):
        sparsity.compact(model, x, cost="fast")
    with pytest.raises(ValueError, match=r"model: expected initialised parameters, got lazy ones; run the model once"):
        sparsity.compact(nn.LazyConv2d(4, 3), x)
    with pytest.raises(TypeError, match=r"example_inputs: expected a tensor, or a tuple with one, got int"):
        sparsity.compact(model, 3)
    with pytest.raises(TypeError, match=r"example_inputs: .* with one, got a tuple of dict$"):
        sparsity.compact(model, ({"image": x},))
    with pytest.raises(TypeError, match=r"example_inputs: .* with one, got an empty list$"):
        sparsity.compact(model, [])


@pytest.mark.parametrize("wrong", [0, 1])
def test_networks_are_built_until_one_is_right(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    build, built = Rewriter.build, list[nn.Module]()

    def first_ones_are_wrong(self: Rewriter) -> nn.Module:
        built.append(build(self) if len(built) >= wrong else fx.symbolic_trace(nn.Flatten()))
        return built[-1]

    monkeypatch.setattr(Rewriter, "build", first_ones_are_wrong)
    model = strike(nn.Sequential(nn.Conv2d(3, 4, 1), Residual(nn.Conv2d(4, 4, 3, padding=1))), 6).double()
    network, _ = compacted(model, torch.randn(2, 3, 5, 5).double())
    assert network is built[-1]
    assert len(built) == wrong + 1


def test_former_names_work_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="multiply_adds: this is called macs"):
        _, report = sparsity.compact(nn.Conv2d(1, 2, 3), torch.zeros(1, 1, 5, 5), cost="multiply_adds")
    with pytest.warns(DeprecationWarning, match="multiply_adds_before: this is called macs_before") as warned:
        assert report.layers[0].multiply_adds_before == report.multiply_adds_before == report.macs_before == 162
    with pytest.warns(DeprecationWarning, match="zero_dead_kernels: this is called zero_dead_filters") as of_module:
        assert sparsity.zero_dead_kernels is sparsity.zero_dead_filters
    assert {each.filename for each in (*warned, *of_module)} == {__file__}
    assert not hasattr(report, "other")
    assert not hasattr(sparsity, "other")
