"""Compaction: smaller networks with the same outputs, at every size of the input."""

import contextlib
import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from loco_ext import sparsity
from loco_ext.experiments import models
from tests.compaction.cases import Network, Residual, Two, compacted, conv, random_case, same, seeds, sizes_of, strike
from tests.covering import covering, slow


def check_random(seed: int, dims: int) -> None:
    model, inputs, _ = random_case(seed, dims)
    before = copy.deepcopy(model.state_dict())
    for fold_norms, fixed_size in ((True, False), (False, False), (False, True)):
        network, report = compacted(model, inputs[0], fold_norms=fold_norms, fixed_size=fixed_size)
        same(network, model, *(inputs[:1] if fixed_size else inputs))
        assert "model" not in report.notes
        assert report.macs_after <= report.macs_executed <= report.macs_before
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("seed", seeds(range(4), range(4, 18)))
def test_random_networks_give_the_same_outputs(seed: int) -> None:
    check_random(seed, 1 + seed % 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("start", [1000, 1040])
def test_many_random_networks_give_the_same_outputs(start: int, dims: int) -> None:
    for seed in range(start, start + 40):
        with contextlib.suppress(pytest.skip.Exception):
            check_random(seed, dims)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        *(("small", pattern) for pattern in ({"sizes": 0.0}, {"dead": 0.0}, {})),
        *(slow(("vgg13", {"sizes": 0.0})), ("mobilenet", {}), slow(("resnet18", {"dead": 0.0}))),
    ],
)
def test_networks_of_the_experiments(name: str, pattern: dict[str, float]) -> None:
    torch.manual_seed(0)
    model = strike(models.MODELS[name].make(3, 10, 32), **pattern).double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.double)
    network, report = compacted(model, x)
    same(network, model, x, x.contiguous(memory_format=torch.channels_last))
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
    x = torch.randn(1, 2, 6, 7).double()
    network, report = compacted(model, x, fixed_size=fixed_size)
    assert sizes_of(network) == [(left, 2, 1, 1), (2, left, 3, 3)]
    assert ("padding of 2" in str(report.layers[0].kept)) == (left == 3)
    if fixed_size:
        same(network, model, x, torch.randn(3, 2, 6, 7).double())
        with pytest.raises(RuntimeError, match="size"):
            network(torch.randn(1, 2, 5, 7).double())
    else:
        same(network, model, x, torch.randn(2, 2, 3, 4).double())


@pytest.mark.parametrize(
    ("mode", "stride", "kept"),
    covering(["zeros", "reflect", "replicate", "circular"], [1, 2, 3], [(0, 0), (0, 4), (4, 4), (3, 1), (2, 2)]),
    ids=str,
)
def test_a_kernel_of_one_tap_reads_the_right_place(mode: str, stride: int, kept: tuple[int, int]) -> None:
    weight = torch.zeros(1, 1, 5, 5).double()
    weight[0, 0, kept[0], kept[1]] = 1
    model = nn.Sequential(conv(weight, stride=stride, padding=2, padding_mode=mode))
    network, report = compacted(model, torch.randn(1, 1, 9, 9).double())
    assert sizes_of(network) == [(1, 1, 1, 1)]
    for size in ((9, 8), (3, 4), (12, 3)):
        x = torch.randn(2, 1, *size).double()
        assert torch.equal(network(x), model(x))
    assert report.layers[0].sizes == {"1x1": 1}


def test_cropping_is_right_for_images_smaller_than_what_is_cropped() -> None:
    weight = torch.zeros(1, 1, 7, 7).double()
    weight[0, 0, 6, 6] = 1
    model = nn.Sequential(conv(weight, padding=3))
    network, _ = compacted(model, torch.randn(1, 1, 9, 9).double())
    for size in (1, 2, 3):
        x = torch.randn(1, 1, size, size).double()
        assert torch.equal(network(x), model(x))


def test_a_block_that_adds_nothing_becomes_the_identity() -> None:
    block = models.BasicBlock(4, 4, 1)
    with torch.no_grad():
        block.residual[3].weight.zero_()
    model = nn.Sequential(nn.Conv2d(3, 4, 1), block, nn.Conv2d(4, 2, 1)).double().eval()
    x = torch.randn(2, 3, 5, 5).double()
    network, report = compacted(model, x)
    same(network, model, x)
    assert sizes_of(network) == [(4, 3, 1, 1), (2, 4, 1, 1)]
    assert [layer.filters_after for layer in report.layers] == [4, 0, 0, 2]
    assert report.macs_after == 25 * (12 + 8)


def test_a_channel_of_a_residual_network_goes_when_every_writer_is_dead() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), models.BasicBlock(4, 4, 1), nn.Conv2d(4, 2, 1)).double().eval()
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = 0, 0
        model[1].residual[3].weight[:2] = 0
    x = torch.randn(2, 3, 5, 5).double()
    network, _ = compacted(model, x)
    same(network, model, x)
    assert sizes_of(network) == [(3, 3, 1, 1), (4, 3, 3, 3), (2, 4, 3, 3), (2, 3, 1, 1)]


def test_macs_are_those_of_eq_10() -> None:
    weight = torch.randn(4, 3, 3, 3)
    weight[0] = 0
    weight[1, :, 0] = weight[1, :, :, 0] = 0
    weight[2, :, [0, 2]] = 0
    weight[2, :, :, [0, 2]] = 0
    model = nn.Sequential(conv(weight.double(), padding=1, stride=2))
    _, report = compacted(model, torch.randn(7, 3, 9, 8).double())
    pixels = 5 * 4
    assert report.macs_before == pixels * 4 * 3 * 9
    assert report.macs_after == pixels * 3 * (0 + 4 + 1 + 9)
    assert report.layers[0].sizes == {"3x3": 1, "2x2": 1, "1x1": 1, "0": 1}
    assert report.layers[0].filters_after == 3


def test_a_single_layer_is_cropped() -> None:
    weight = torch.zeros(1, 1, 3, 3).double()
    weight[0, 0, 1, 1] = 1
    x = torch.randn(1, 1, 5, 5).double()
    network, _ = compacted(conv(weight, padding=1), x)
    assert sizes_of(network) == [(1, 1, 1, 1)]
    assert torch.equal(network(x), x)


def test_identity_kernels_are_counted() -> None:
    weight = torch.zeros(3, 2, 3, 3)
    weight[0, 1, 1, 1] = weight[1, 0, 0, 0] = 1
    weight[2, :, 1, 1] = 1
    _, report = sparsity.compact(nn.Sequential(conv(weight.double())), torch.randn(1, 2, 5, 5).double())
    assert report.layers[0].identity_filters == 1


def test_features_of_channels_that_are_gone_leave_the_linear_layer() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        x = net.convolution(x)
        return net.linear(x.view(x.size(0), -1))

    model = Network(function, convolution=nn.Conv2d(1, 6, 3), linear=nn.Linear(6 * 4 * 5, 3)).double()
    with torch.no_grad():
        model.convolution.weight[2:4] = 0
        model.linear.weight[:, 20:40] = 0
    x = torch.randn(2, 1, 6, 7).double()
    network, report = compacted(model, x)
    same(network, model, x)
    assert network.linear.weight.shape == (3, 60)
    assert report.layers[1].macs_after == 180


def test_nan_and_infinite_weights_stay() -> None:
    model = strike(models.small_cnn(3, 4, 8), 0).double().eval()
    with torch.no_grad():
        model[1].bias[:4] = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0]).double()
        model[3].weight[5, 2, 1, 1] = float("nan")
    x = torch.randn(2, 3, 8, 8).double()
    network, _ = compacted(model, x, fold_norms=False)
    assert torch.equal(network(x).isnan(), model(x).isnan())


@pytest.mark.parametrize("channels_last", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_measured_network_gives_the_same_outputs(channels_last: bool) -> None:
    torch.manual_seed(1)
    model = strike(models.cifar_resnet(3, 10, 8, blocks=1), 1).double().eval()
    x = torch.randn(2, 3, 8, 8).double()
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    network, report = sparsity.compact(model, x)
    same(network, model, x)
    assert report.latency_before is not None
    assert report.latency_after is not None
    assert report.latency_after <= report.latency_before
    assert str(round(report.latency_after * 1e3, 3)) in str(report)


def test_the_smaller_network_trains_and_compiles() -> None:
    model = strike(models.small_cnn(3, 4, 8), 0)
    model.train()
    x = torch.randn(4, 3, 8, 8)
    network, _ = compacted(model, x, fold_norms=False)
    assert network.training
    assert model.training
    compiled = torch.compile(copy.deepcopy(network).eval(), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model.eval()(x), rtol=1e-4, atol=1e-5)
    network(x).sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_no_narrow_convolution_of_one_tap_has_a_stride() -> None:
    """The backward of such a convolution writes out of bounds in oneDNN; a crash here is that defect."""
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Conv2d(3, 24, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(24, 16, 1, 2)).double().eval()
    )
    model[0].weight.data[:20] = 0
    x = torch.randn(8, 3, 16, 16, dtype=torch.float64)
    network, _ = compacted(model, x)
    layer = network.get_submodule("2")
    assert (layer.weight.shape, layer.stride) == ((16, 4, 1, 1), (1, 1))
    same(network, model, x, x[:1, :, :7, :9])
    model(x).square().mean().backward()
    network.float()(x.float().contiguous(memory_format=torch.channels_last)).square().mean().backward()
    torch.testing.assert_close(layer.weight.grad, model[2].weight.grad[:, 20:].float())


def test_frozen_parameters_stay_frozen() -> None:
    model = strike(models.small_cnn(3, 4, 8), 0)
    model[0].weight.requires_grad_(False)
    network, _ = compacted(model, torch.randn(2, 3, 8, 8))
    frozen = [name for name, p in network.named_parameters() if not p.requires_grad]
    assert "0.weight" in frozen or any(name.startswith("0_") for name in frozen)
    assert not any(name.startswith("3") for name in frozen)


@pytest.mark.parametrize("with_norm", [False, True])
def test_biases_are_frozen_on_their_own(with_norm: bool) -> None:
    norms = [nn.BatchNorm2d(8)] if with_norm else []
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *norms, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4))
    strike(model, 0)
    first, second, _, last = (model[i] for i in (0, -3, -2, -1))
    for frozen in (first.bias, second.weight, last.weight):
        frozen.requires_grad_(False)
    network, _ = compacted(model, torch.randn(2, 3, 8, 8))
    trains = [(m.weight.requires_grad, m.bias.requires_grad) for m in network.modules() if hasattr(m, "kernel_size")]
    assert (trains[0], trains[-1]) == ((True, False), (False, True))
    head = network.get_submodule(str(len(model) - 1))
    assert (head.weight.requires_grad, head.bias.requires_grad) == (False, True)


def test_a_bias_that_a_norm_makes_trains_as_the_weight_does() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3))
    network, _ = compacted(strike(model, 0), torch.randn(2, 3, 8, 8))
    assert all(p.requires_grad for p in network.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = strike(models.cifar_resnet(3, 10, 8, blocks=1), 4).to(dtype).eval()
    x = torch.randn(2, 3, 8, 8).to(dtype)
    network, _ = compacted(model, x, fold_norms=False)
    expected = model(x)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert network(x).dtype == dtype
    assert (network(x) - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.slow
def test_the_same_network_whatever_the_process() -> None:
    code = (
        "import torch; from tests.compaction.cases import random_network; "
        "from loco_ext import sparsity; torch.manual_seed(3); model = random_network(7, 2); "
        "network, _ = sparsity.compact(model, torch.randn(2, 3, 12, 11).double(), cost='macs'); "
        "print(network.code, [tuple(p.shape) for p in network.parameters()])"
    )
    texts = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
        for _ in range(2)
    }
    assert len(texts) == 1


def test_wrappers_are_taken_off() -> None:
    model = strike(models.small_cnn(3, 4, 8), 0).eval()
    x = torch.randn(2, 3, 8, 8)
    expected = sum(p.numel() for p in compacted(model, x)[0].parameters())
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager"), AveragedModel(model)):
        network, _ = compacted(wrapped, x)
        assert sum(p.numel() for p in network.parameters()) == expected
        torch.testing.assert_close(network(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_model_of_nested_outputs_and_several_inputs() -> None:
    def function(net: Network, x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        x, y = net.one(x), net.other(y)
        return {"both": (x + y, x)}

    model = strike(Two(function, one=nn.Conv2d(2, 4, 3), other=nn.Conv2d(3, 4, 3)), 5).double().eval()
    inputs = torch.randn(2, 2, 6, 6).double(), torch.randn(2, 3, 6, 6).double()
    network, _ = compacted(model, inputs)
    for result, expected in zip(network(*inputs)["both"], model(*inputs)["both"], strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_bad_arguments_are_named() -> None:
    model, x = nn.Conv2d(1, 1, 3), torch.zeros(1, 1, 4, 4)
    with pytest.raises(TypeError, match=r"model: expected a module, got str"):
        sparsity.compact("model", x)
    with pytest.raises(ValueError, match=r"cost: expected one of 'measured', 'macs', got 'fast'"):
        sparsity.compact(model, x, cost="fast")
    with pytest.raises(TypeError, match=r"example_inputs: expected a tensor, or a tuple with one, got int"):
        sparsity.compact(model, 3)


def test_residuals_are_scattered_only_where_nothing_else_reads_them() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        y = net.layer(x)
        return torch.cat([x + y, y], 1)

    twice = Network(function, layer=nn.Conv2d(4, 4, 3, padding=1))
    model = strike(nn.Sequential(nn.Conv2d(3, 4, 1), twice, Residual(nn.Conv2d(8, 8, 3, padding=1))), 6).double()
    x = torch.randn(2, 3, 5, 5).double()
    network, _ = compacted(model, x)
    same(network, model, x)


def test_former_names_work_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="multiply_adds: this is called macs"):
        _, report = sparsity.compact(nn.Conv2d(1, 2, 3), torch.zeros(1, 1, 5, 5), cost="multiply_adds")
    with pytest.warns(DeprecationWarning, match="multiply_adds_before: this is called macs_before") as warned:
        assert report.layers[0].multiply_adds_before == report.multiply_adds_before == report.macs_before == 162
    with pytest.warns(DeprecationWarning, match="kernels_before: this is called filters_before"):
        assert report.layers[0].kernels_before == 2
    with pytest.warns(DeprecationWarning, match="zero_dead_kernels: this is called zero_dead_filters") as of_module:
        assert sparsity.zero_dead_kernels is sparsity.zero_dead_filters
    assert {each.filename for each in (*warned, *of_module)} == {__file__}
    assert not hasattr(report, "other")
    assert not hasattr(sparsity, "other")
