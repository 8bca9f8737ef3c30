"""Locally connected layers against the convolutions that they are made from, and against unfolded images."""

import itertools
import math
import random

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from loco_ext.nn import LocallyConnected1d, LocallyConnected2d, LocallyConnected3d
from tests.nn.cases import CONVOLUTIONS, LAYERS, block_of_taps, layer_class, random_conv, random_layer, windows
from tests.tolerances import STANDARD_ERRORS, WITH_CONVOLUTIONS, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float32), (1, torch.float64)], ids=str)
def test_random_convolutions_are_taken_over_and_given_back(seed, dtype):
    generator = random.Random(seed)
    tolerance = WITH_CONVOLUTIONS[dtype]
    for _ in range(30):
        conv, case = random_conv(generator, dtype)
        layer = layer_class(case).from_conv(conv, case.input_size)
        x = torch.randn(generator.randint(1, 3), conv.in_channels, *case.input_size, dtype=dtype)
        expected = conv(x)
        torch.testing.assert_close(layer(x), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(layer(x[0]), expected[0], rtol=tolerance, atol=tolerance)
        back = layer.to_conv()
        assert repr(back) == repr(conv)
        torch.testing.assert_close(back(x), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", range(2))
def test_layers_with_own_weights_everywhere_compute_as_unfolded_images_do(seed):
    """The reference has weights for each tap of each output pixel, which add up where taps read one pixel."""
    generator = random.Random(seed)
    for _ in range(20):
        layer, case = random_layer(generator)
        blocks = block_of_taps(layer, case)
        weights = torch.randn(*blocks.shape, *layer.weight.shape[1:], dtype=torch.float64, requires_grad=True)
        live = blocks >= 0
        with torch.no_grad():
            layer.weight.zero_().index_add_(0, blocks[live], weights[live])

        images = torch.randn(3, layer.in_channels, *case.input_size, dtype=torch.float64)
        x, other = images.clone().requires_grad_(), images.clone().requires_grad_()
        bias = torch.zeros(()) if layer.bias is None else layer.bias.detach().clone()
        bias.requires_grad_()
        read = windows(other, case).unflatten(1, (layer.groups, -1))  # [N, groups, depth, n_out, n_taps]
        expected = torch.einsum("ngdot,otgdw->ngwo", read, weights).flatten(1, 2) + bias.t()
        expected = expected.unflatten(2, layer.output_size)
        y = layer(x)
        torch.testing.assert_close(y, expected)
        linear = layer.to_dense()
        torch.testing.assert_close(linear(images.flatten(1)).view(y.shape), y)
        assert linear.weight.count_nonzero() == layer.weight.count_nonzero()
        grad = torch.randn_like(y)
        y.backward(grad)
        expected.backward(grad)
        torch.testing.assert_close(x.grad, other.grad)
        torch.testing.assert_close(layer.weight.grad[blocks[live]], weights.grad[live])
        if layer.bias is not None:
            torch.testing.assert_close(layer.bias.grad, bias.grad)


class Copies(TorchDispatchMode):
    """Dispatch mode that records the shapes of the copies that are made."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.name().split("::")[1].split(".")[0] in ("clone", "_to_copy", "copy_", "block_sparse_by_pixel"):
            self.made.append(tuple(result.shape))
        return result


@pytest.mark.parametrize("pixels_last", [True, False], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("case", [(LocallyConnected2d, (5, 6)), (LocallyConnected3d, (4, 3, 5))], ids=["2d", "3d"])
def test_activations_keep_their_format_with_no_copy_or_one_a_pass(case, pixels_last):
    layer_class, size = case
    layer = layer_class(3, 4, 3, padding=1, input_size=size)
    other = torch.channels_last if len(size) == 2 else torch.channels_last_3d
    memory_format = torch.contiguous_format if pixels_last else other
    x = torch.randn(2, 3, *size).contiguous(memory_format=memory_format).requires_grad_()
    grad = torch.randn(2, 4, *size).contiguous(memory_format=memory_format)
    with Copies() as forward:
        y = layer(x)
    with Copies() as backward:
        gradients = torch.autograd.grad(y, (x, layer.weight), grad)
    assert y.is_contiguous(memory_format=memory_format)
    shapes = sorted([(2, 5 * 6 if len(size) == 2 else 60, 3), (2, 4, *size)]) if pixels_last else []
    assert sorted(forward.made) == shapes
    assert len(backward.made) == (2 if pixels_last else 0)
    assert gradients[0].shape == x.shape


@pytest.mark.parametrize("groups", [1, 8])
def test_a_memory_format_for_images_leaves_weights_as_they_are(groups):
    layer = LocallyConnected2d(8, 8, 3, groups=groups, input_size=5)
    x = torch.randn(2, 8, 5, 5).contiguous(memory_format=torch.channels_last)
    layer(x).sum().backward()
    nn.Sequential(layer).to(dtype=torch.float64, memory_format=torch.channels_last)
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float64
    assert layer.weight.is_contiguous()
    assert layer.weight.grad.is_contiguous()
    with Copies() as copies:
        layer(x.double()).sum().backward()
    assert tuple(layer.weight.shape) not in copies.made


def layouts(x):
    """Return images of the same shape in different strides, by name; unbatched ones too."""
    wider, deeper = torch.randn(*x.shape[:-1], x.shape[-1] + 2), torch.randn(x.shape[0], x.shape[1] + 2, *x.shape[2:])
    last = x.movedim(1, -1).contiguous().movedim(-1, 1)
    formats = {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(x.dim(), [])
    return {
        "contiguous": x,
        "channels at the end": last,
        **{str(form): x.to(memory_format=form) for form in formats},
        "sliced pixels": wider[..., 1:-1].copy_(x),
        "sliced channels": deeper[:, 1:-1].copy_(x),
        "sliced channels at the end": deeper.movedim(1, -1).contiguous()[..., 1:-1].movedim(-1, 1),
        "expanded samples": x[:1].expand_as(x),
        "expanded channels": x[:, :1].expand_as(x),
        "unbatched": x[0],
        "unbatched, channels at the end": last[0],
    }


@pytest.mark.parametrize("sizes", [(1,), (3,), (1, 1), (1, 3), (2, 3), (1, 1, 1), (2, 1, 3)], ids=str)
def test_outputs_have_the_strides_of_a_convolutions(sizes):
    """Later views and convolutions of the outputs then behave as after nn.Conv."""
    batches = (1, 2) if len(sizes) < 3 else (2,)  # torch computes a single volume in ways that take contiguous ones
    for batch, channels_in, channels_out in itertools.product(batches, (1, 2), (1, 2)):
        padding = 2 if sizes == (1, 1) else 1  # one pixel, which has any strides, gives several
        conv = CONVOLUTIONS[len(sizes) - 1](channels_in, channels_out, 3, padding=padding)
        layer = LAYERS[len(sizes) - 1].from_conv(conv, sizes)
        for name, x in layouts(torch.randn(batch, channels_in, *sizes)).items():
            expected, found = conv(x), layer(x)
            torch.testing.assert_close(found, expected)
            if x.dim() == len(sizes) + 2 or len(sizes) < 3:
                assert found.stride() == expected.stride(), (name, batch, channels_in, channels_out, x.stride())
        assert layer(x.new_empty(0, channels_in, *sizes)).shape == (0, channels_out, *layer.output_size)


@pytest.mark.parametrize("sizes", [(1,), (3,), (1, 3), (3, 4), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_batch_norm_before_a_layer_gets_the_gradients_that_it_gets_before_a_convolution(batch, sizes):
    """A batch norm's backward pass in torch misreads the gradient of a single image if its strides are unusual."""
    axes = len(sizes)
    conv = CONVOLUTIONS[axes - 1](2, 3, 3, padding=1).double()
    layer = LAYERS[axes - 1].from_conv(conv, sizes)
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes - 1](2).double().eval()
    x = torch.randn(batch, 2, *sizes, dtype=torch.float64, requires_grad=True)
    inputs = x, norm.weight, norm.bias
    expected, found = (torch.autograd.grad(each(norm(x)).sin().sum(), inputs) for each in (conv, layer))
    torch.testing.assert_close(found, expected)


def test_initial_weights_are_distributed_as_a_convolutions():
    """Weights and biases are uniform with the variance of nn.Conv2d's; taps that share a block add up."""
    layer = LocallyConnected2d(6, 8, (3, 5), padding=(1, 2), groups=2, input_size=(16, 16))
    bound = 1 / math.sqrt(3 * 15)
    conv = nn.Conv2d(6, 8, (3, 5), groups=2)
    assert conv.weight.abs().max() <= bound
    for parameter in (layer.weight.detach(), layer.bias.detach()):
        n = parameter.numel()
        assert 0.99 * bound < parameter.abs().max() <= bound
        assert abs(parameter.mean()) < STANDARD_ERRORS * bound / math.sqrt(3 * n)
        # Squares of numbers uniform in +-1 have mean 1/3 and variance 4/45.
        assert abs((parameter / bound).square().mean() - 1 / 3) < STANDARD_ERRORS * math.sqrt(4 / 45 / n)

    shared = LocallyConnected1d(20, 20, 8, padding=4, padding_mode="circular", input_size=4)  # two taps share a block
    both = shared.weight.detach() * math.sqrt(20 * 8)
    # Squares of sums of two such numbers have mean 2/3 and variance 28/45.
    assert abs(both.square().mean() - 2 / 3) < STANDARD_ERRORS * math.sqrt(28 / 45 / both.numel())
    assert both.abs().max() > 1.8

    grown = LocallyConnected2d(3, 4, 3, input_size=8).grow(1)
    grown.reset_parameters()
    assert (grown.weight.abs().amax((1, 2, 3)) > 0).equal(grown.pattern.local_mask())


def test_initial_weights_as_a_linear_layers():
    layer = LocallyConnected2d(3, 4, 3, padding=1, input_size=6)
    layer.grow(6).reset_parameters(like="linear")
    bound = 1 / math.sqrt(3 * 36)
    assert 0.99 * bound < layer.weight.abs().max() <= bound
    assert layer.bias.abs().max() <= bound
    corner = LocallyConnected1d(50, 50, 3, padding=1, input_size=4)
    corner.reset_parameters(like="linear")
    at_border, inside = corner.weight[:2].abs().max() * math.sqrt(100), corner.weight[2:5].abs().max() * math.sqrt(150)
    assert 0.99 < at_border <= 1
    assert 0.99 < inside <= 1
    with pytest.raises(ValueError, match=r"like: expected one of 'conv', 'linear', got 'dense'"):
        layer.reset_parameters(like="dense")


def test_padding_before_and_after_may_differ():
    layer = LocallyConnected2d(2, 3, 3, padding=((2, 0), (0, 1)), padding_mode="reflect", input_size=(5, 4))
    assert layer.output_size == (5, 3)
    back = layer.to_conv()
    assert isinstance(back[0], nn.ReflectionPad2d)
    again = LocallyConnected2d.from_conv(back[1], (7, 5))
    x = torch.randn(2, 2, 5, 4)
    torch.testing.assert_close(again(back[0](x)), back(x))


def test_what_a_convolution_is_like_is_kept():
    conv = nn.Conv2d(2, 3, 3, dtype=torch.bfloat16).eval()
    conv.weight.requires_grad_(False)
    layer = LocallyConnected2d.from_conv(conv, 5)
    assert not layer.training
    assert not layer.weight.requires_grad
    assert layer.bias.requires_grad
    assert layer.weight.dtype == torch.bfloat16
    random_state = torch.get_rng_state()
    back = layer.to_conv()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (back.training, back.weight.requires_grad, back.bias.requires_grad) == (False, False, True)
    assert same_bits(back.weight, conv.weight)
    assert same_bits(back.bias, conv.bias)


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ValueError, {"in_channels": 0}, r"in_channels: expected at least 1, got 0"),
        (ValueError, {"groups": 2}, r"in_channels: expected a multiple of groups, 2, got 3"),
        (TypeError, {"out_channels": 2.0}, r"out_channels: expected an int, got 2.0"),
        (ValueError, {"groups": 0}, r"groups: expected at least 1, got 0"),
        (ValueError, {"input_size": (5, 5, 5)}, r"input_size: expected an int, or one for each of 2 axes"),
        (ValueError, {"input_size": (5, 2)}, r"kernel_size: expected at most the padded input, \(5, 2\)"),
        (ValueError, {"padding": "some"}, r"padding: expected ints, pairs of them, 'valid' or 'same'"),
    ],
)
def test_bad_arguments_are_refused(error, arguments, message):
    with pytest.raises(error, match=message):
        LocallyConnected2d(**{"in_channels": 3, "out_channels": 4, "kernel_size": 3, "input_size": 5, **arguments})


def test_bad_inputs_are_refused():
    layer = LocallyConnected2d(3, 4, 3, input_size=(5, 6))
    for shape in ((2, 3, 6, 5), (2, 4, 5, 6), (5, 6), (1, 2, 3, 5, 6), (3, 5, 7)):
        with pytest.raises(ValueError, match=r"input: expected shape \(N, 3, 5, 6\) or \(3, 5, 6\), as in_channels"):
            layer(torch.zeros(shape))
    with pytest.raises(TypeError, match=r"input: expected a tensor, got list"):
        layer([1.0])
    with pytest.raises(TypeError, match=r"input: expected torch.float32 as the weight of the layer, got torch.float64"):
        layer(torch.zeros(3, 5, 6, dtype=torch.float64))


class Standardised(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


def with_forward() -> nn.Module:
    conv = nn.Conv2d(1, 1, 3)
    conv.forward = lambda x: x
    return conv


def hooked(kind: str) -> nn.Module:
    conv = nn.Conv2d(1, 1, 3)
    getattr(conv, f"register_{kind}")(lambda *_: None)
    return conv


@pytest.mark.parametrize(
    ("conv", "message"),
    [
        (nn.Linear(3, 3), "an nn.Conv2d, got Linear"),
        (nn.ConvTranspose2d(3, 4, 3), "an nn.Conv2d, got ConvTranspose2d"),
        (nn.Conv1d(1, 1, 1), "an nn.Conv2d, got Conv1d"),
        (Standardised(1, 1, 3), "what computes as nn.Conv2d, got Standardised"),
        (with_forward(), "what computes as nn.Conv2d, got Conv2d"),
        (nn.LazyConv2d(3, 3), "an initialised module, got a LazyConv2d"),
        *(
            (hooked(kind), "an nn.Conv2d without hooks, got one with some")
            for kind in ("forward_hook", "full_backward_hook", "full_backward_pre_hook")
        ),
    ],
)
def test_only_plain_convolutions_of_as_many_axes_are_taken(conv, message):
    with pytest.raises(TypeError, match=f"conv: expected {message}"):
        LocallyConnected2d.from_conv(conv, 5)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def pruned(conv: nn.Module) -> None:
    """Prune weight and bias, and change the parameters since the last forward."""
    nn.utils.prune.random_unstructured(conv, "weight", 0.5)
    nn.utils.prune.random_unstructured(conv, "bias", 1)
    with torch.no_grad():
        conv.weight_orig.add_(1)
        conv.bias_orig.add_(1)


def parametrized(conv: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(conv)
    nn.utils.parametrize.register_parametrization(conv, "bias", Doubled())


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("compute", [pruned, parametrized])
def test_computed_weights_and_biases_are_taken_and_train_if_their_parameters_do(compute, trains):
    conv = nn.Conv2d(2, 3, 3)
    compute(conv)
    conv.requires_grad_(trains)
    layer, x = LocallyConnected2d.from_conv(conv, 5), torch.randn(2, 2, 5, 5)
    assert (layer.weight.requires_grad, layer.bias.requires_grad) == (trains, trains)
    torch.testing.assert_close(layer(x), conv(x))


@pytest.mark.parametrize("how", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_a_layer_whose_weight_is_computed_loads_its_own_state_and_no_other(how):
    def made(radius, pruned=0):
        layer = LocallyConnected2d(2, 2, 3, padding=1, input_size=5).grow(radius)
        layer.prune(torch.arange(layer.pattern.nnz) != pruned).reset_parameters("linear")
        return how(layer)

    layer, same, x = made(1), made(1), torch.randn(1, 2, 5, 5)
    same.load_state_dict(layer.state_dict())
    torch.testing.assert_close(same(x), layer(x))
    before = layer(x)
    for other, said in (
        (made(1, pruned=1), "expected its own blocks, as its weight is computed, got others"),
        (made(2), r"weight: expected 528 blocks, as the indices say, .* got shape \(360"),
    ):
        with pytest.raises(RuntimeError, match=said):
            layer.load_state_dict(other.state_dict())
        layer.load_state_dict(same.state_dict())  # torch has loaded what fits
        assert torch.equal(layer(x), before)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*bias"):
        layer.load_state_dict({name: value for name, value in same.state_dict().items() if name != "bias"})
