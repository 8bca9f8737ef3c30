"""Convolution by kernels of different sizes against float64 convolutions of each part, at awkward shapes."""

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import loco_ext
from loco_ext.ops import mixed_conv2d
from tests.covering import slow
from tests.instruction_sets import BACKENDS, using

FORMATS = (torch.contiguous_format, torch.channels_last)
TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-14}


class Case(NamedTuple):
    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor]
    pads: list[tuple[int, int, int, int]]
    order: Tensor | None
    options: dict[str, Any]


@pytest.fixture(params=[name for name in BACKENDS if "bf16" not in name])  # no kernel has bfloat16 instructions
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from using(request.param)


def random_case(seed: int) -> Case:
    """Return a case whose parts have results of one size; the pads follow from it and may be uneven or negative."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    dtype = choose.choice(tuple(TOLERANCES))
    batch, channels = choose.choice((1, 2, 3, 5, 8, 17)), choose.choice((1, 2, 3, 7, 16, 19, 33))
    size = choose.randint(1, 20), choose.choice((1, 2, 3, 4, 7, 8, 15, 16, 17, 33))
    out = choose.randint(1, 8), choose.choice((1, 2, 4, 5, 8, 16, 18, 35))
    stride = choose.randint(1, 3), choose.randint(1, 3)
    dilation = choose.randint(1, 2), choose.randint(1, 2)
    weights, pads = [], []
    for _ in range(choose.randint(1, 4)):
        kernels, taps = choose.randint(1, 14), (choose.randint(1, 4), choose.randint(1, 4))
        weights.append(torch.randn(kernels, channels, *taps, dtype=dtype))
        before = [choose.randint(1 - size[a], 3) for a in (0, 1)]
        room = [(out[a] - 1) * stride[a] + dilation[a] * (taps[a] - 1) + 1 - size[a] for a in (0, 1)]
        pads.append((before[0], room[0] - before[0], before[1], room[1] - before[1]))
    count = sum(map(len, weights))
    biases = [torch.randn(len(weight), dtype=dtype) for weight in weights] if choose.random() < 0.7 else []
    order = torch.randperm(count) if choose.random() < 0.7 else None
    x = torch.randn(batch, channels, *size, dtype=dtype).to(memory_format=choose.choice(FORMATS))
    options: dict[str, Any] = {"stride": stride, "dilation": dilation, "relu": choose.random() < 0.5}
    if choose.random() < 0.5:
        shape = choose.choice(((batch, count, *out), (batch, count, *out), (count, 1, 1)))
        add = torch.randn(shape, dtype=dtype)
        options["add"] = add.contiguous(memory_format=choose.choice(FORMATS)) if len(shape) == 4 else add
    return Case(x, weights, biases, pads, order, options)


def expected_of(case: Case) -> Tensor:
    """Return the result in float64, computed on windows of the image padded with more zeros than any part needs."""
    wide = max(0, *itertools.chain(*case.pads))
    image = F.pad(case.x.double(), [wide] * 4)
    parts = []
    for i, (weight, (top, bottom, left, right)) in enumerate(zip(case.weights, case.pads, strict=True)):
        rows = slice(wide - top, wide + case.x.shape[2] + bottom)
        columns = slice(wide - left, wide + case.x.shape[3] + right)
        bias = case.biases[i].double() if case.biases else None
        windows = image[:, :, rows, columns]
        options = {key: case.options[key] for key in ("stride", "dilation")}
        parts.append(F.conv2d(windows, weight.double(), bias, **options))
    result = torch.cat(parts, 1)
    if case.order is not None:
        result = torch.stack([result[:, kernel] for kernel in case.order.tolist()], 1)
    if case.options.get("add") is not None:
        result = result + case.options["add"].double()
    return result.relu() if case.options["relu"] else result


def assert_right(case: Case, result: Tensor, name: str = "") -> None:
    expected = expected_of(case)
    assert result.shape == expected.shape
    assert result.dtype == case.x.dtype
    error = (result - expected).abs().max()
    assert error <= TOLERANCES[case.x.dtype] * max(1.0, expected.abs().max().item()), name


@pytest.mark.parametrize("shape", [(2, 1, 4, 5), (1, 1, 4, 1), (2, 3, 1, 1), (1, 3, 1, 1), (2, 3, 4, 1)])
@pytest.mark.parametrize("memory_format", FORMATS)
def test_results_have_the_format_of_images_whose_strides_alone_tell_it(
    shape: tuple[int, ...], memory_format: torch.memory_format
) -> None:
    x, weights = torch.randn(shape).to(memory_format=memory_format), [torch.randn(4, shape[1], 1, 1)]
    result = mixed_conv2d(x, weights, [], [(1, 1, 1, 1)])
    assert result.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(result, F.conv2d(x, weights[0], padding=1))


@pytest.mark.parametrize("seeds", [range(60), slow(range(1000, 1200))], ids=str)
def test_random_shapes_match_float64(backend: str, seeds: range) -> None:
    for seed in seeds[: 20 if backend == "reference" else None]:
        case = random_case(seed)
        assert_right(case, mixed_conv2d(*case[:-1], **case.options), f"seed {seed}")


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize(("channels", "size"), [(3, 40), (70, 12), (530, 4)])
def test_large_layers_in_bands_of_rows(channels: int, size: int, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, channels, size, 2 * size).contiguous(memory_format=memory_format)
    weights = [torch.randn(50, channels, 3, 3), torch.randn(23, channels, 1, 1), torch.randn(70, channels, 2, 3)]
    case = Case(x, weights, [], [(1, 1, 1, 1), (0, 0, 0, 0), (0, 1, 1, 1)], torch.randperm(143), {"relu": False})
    result = mixed_conv2d(*case[:-1])
    assert result.is_contiguous(memory_format=memory_format)
    expected = expected_of(case._replace(options={"relu": False, "stride": 1, "dilation": 1}))
    assert (result - expected).abs().max() <= 1e-7 * (9 * channels) ** 0.5 * expected.abs().max()


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("batch", [1, 5])
def test_the_number_of_threads_changes_no_bit(memory_format: torch.memory_format, batch: int) -> None:
    x = torch.randn(batch, 24, 31, 21).contiguous(memory_format=memory_format)
    weights, pads = [torch.randn(9, 24, 3, 3), torch.randn(20, 24, 1, 1)], [(1, 1, 1, 1), (0, 0, 0, 0)]
    add = torch.randn(batch, 29, 31, 21)
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(mixed_conv2d(x, weights, [], pads, add=add, relu=True))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("relu", [False, True])
def test_nan_and_infinity_stay_where_a_kernel_sees_them(backend: str, memory_format: torch.memory_format, relu: bool):
    x = torch.ones(3, 4, 6, 8).contiguous(memory_format=memory_format)
    x[1, 2, 3, 4], x[2, 0, 0, 0] = float("nan"), float("inf")
    result = mixed_conv2d(x, [torch.ones(2, 4, 1, 1), torch.ones(3, 4, 3, 3)], [], [(0,) * 4, (1,) * 4], relu=relu)
    points, boxes = result[:, :2], result[:, 2:]
    assert points.isnan().nonzero().tolist() == [[1, k, 3, 4] for k in range(2)]
    assert points.isinf().nonzero().tolist() == [[2, k, 0, 0] for k in range(2)]
    assert boxes.isnan().sum() == 3 * 9
    assert boxes.isinf().sum() == 3 * 4
    assert result[0].isfinite().all()
    parts = [torch.ones(2, 4, 1, 1)], [], [(0,) * 4]
    summed = mixed_conv2d(torch.ones(3, 4, 6, 8), *parts, add=x[:, :2] - 10, relu=relu)
    assert summed.isinf().nonzero().tolist() == [[2, 0, 0, 0]]
    x[1, 1, 3, 4] = float("nan")
    assert mixed_conv2d(torch.ones(3, 4, 6, 8), *parts, add=x[:, :2], relu=relu).isnan().nonzero().tolist() == [
        [1, 1, 3, 4]
    ]


def test_gradients_are_those_of_the_parts() -> None:
    case = random_case(3)
    add = torch.randn_like(expected_of(case))
    tensors = [t.double().requires_grad_() for t in (case.x, add, *case.weights, *case.biases)]
    x, add, *rest = tensors
    weights, biases = rest[: len(case.weights)], rest[len(case.weights) :]
    again = Case(x, weights, biases, case.pads, case.order, case.options | {"add": add})
    torch.manual_seed(0)
    direction = torch.randn_like(expected_of(again))
    mine = torch.autograd.grad((mixed_conv2d(*again[:-1], **again.options) * direction).sum(), tensors)
    theirs = torch.autograd.grad((expected_of(again) * direction).sum(), tensors)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_what_is_added_may_be_of_another_shape_or_dtype() -> None:
    x, parts = torch.ones(2, 1, 1, 1), ([torch.ones(3, 1, 1, 1)], [], [(0,) * 4])
    wide = torch.full((2, 3, 4, 5), 2.0)
    assert torch.equal(mixed_conv2d(x, *parts, add=wide), wide + 1)
    result = mixed_conv2d(x, *parts, add=torch.full((), -3.0, dtype=torch.float64), relu=True)
    assert torch.equal(result, torch.zeros(2, 3, 1, 1))
    result = mixed_conv2d(x, *parts, add=torch.full((2, 3, 1, 1), 1e-9, dtype=torch.float64))
    assert result.dtype == torch.float64
    assert (result == 1 + 1e-9).all()


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("seed", range(4))
def test_one_image_gives_what_a_batch_of_one_does(seed: int, backend: str) -> None:
    case = random_case(seed)
    expected = expected_of(case._replace(options={**case.options, "add": None, "relu": False}))[0]
    images = {"x": case.x[0], "weights": case.weights, "biases": case.biases, "pads": case.pads, "order": case.order}
    options = {name: case.options[name] for name in ("stride", "dilation")}
    added = torch.randn_like(expected)
    near = {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False}
    with loco_ext.backend(backend):
        torch.testing.assert_close(mixed_conv2d(**images, **options), expected, **near)
        for add in (added, added[:, :1, :1], torch.stack([added, -added]), added[None]):
            result = mixed_conv2d(**images, **options, add=add.to(case.x.dtype), relu=True)
            torch.testing.assert_close(result, (expected + add).relu(), **near)
        case.weights[0].requires_grad_()
        assert mixed_conv2d(**images, **options).requires_grad


def test_empty_batches_and_strided_images() -> None:
    weight = torch.randn(5, 3, 3, 3)
    assert mixed_conv2d(torch.zeros(0, 3, 8, 8), [weight], [], [(1,) * 4]).shape == (0, 5, 8, 8)
    whole = torch.randn(4, 6, 9, 18)
    x = whole[::2, 1::2, 1:, ::2]
    torch.testing.assert_close(mixed_conv2d(x, [weight], [], [(1,) * 4]), F.conv2d(x, weight, padding=1))
    transposed = weight.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(mixed_conv2d(x, [transposed], [], [(1,) * 4]), F.conv2d(x, weight, padding=1))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 2, 1)
        self.register_buffer("order", torch.tensor([5, 0, 1, 4, 3, 2]))

    def forward(self, x: Tensor) -> Tensor:
        weights, biases = [self.large.weight, self.small.weight], [self.large.bias, self.small.bias]
        add = x.repeat(1, 2, 1, 1)
        return mixed_conv2d(x, weights, biases, [(1, 1, 1, 1), (0, 0, 0, 0)], self.order, add=add, relu=True)


def test_torch_sees_one_call_or_convolutions() -> None:
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 3, 7, 7)
    graph = fx.symbolic_trace(fx.symbolic_trace(layer))
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [mixed_conv2d]
    assert {node.name for node in graph.graph.nodes if node.op == "call_method"} == {"repeat"}
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(graph(x), expected)
        exported = torch.export.export(layer, (x,)).module()
        torch.testing.assert_close(exported(x), expected)
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), expected)
        with torch.autocast("cpu", torch.bfloat16):
            cast = layer(x)
        assert cast.dtype == torch.float32  # a bfloat16 convolution is added to x
        torch.testing.assert_close(torch.vmap(layer)(x[None])[0], expected)
        torch.testing.assert_close(cast.float(), expected, rtol=2e-2, atol=2e-2)
    traced = torch.jit.trace(layer, (x,))  # which calls it with and without gradients, and compares
    torch.testing.assert_close(traced(x), expected)
    assert traced(x).requires_grad
    _, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    ahead = (layer.double()(x.double() + 1e-6) - layer(x.double() - 1e-6)) / 2e-6
    torch.testing.assert_close(tangent.double(), ahead, rtol=1e-4, atol=1e-4)


WEIGHT = torch.zeros(4, 3, 3, 3)


def arguments(**changed: Any) -> dict[str, Any]:
    plain = {"x": torch.zeros(2, 3, 8, 8), "weights": [WEIGHT], "biases": [], "pads": [(1,) * 4]}
    return plain | changed


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"x": torch.zeros(8, 8)}, ValueError, r"x: .* \(N, C_in, H, W\) or \(C_in, H, W\), got shape \(8, 8\)"),
        ({"x": torch.zeros(2, 8, 8)}, ValueError, r"weights\[0\]: expected shape \(filters, 2, height"),
        ({"x": 1}, ValueError, "x: expected a tensor .* got int"),
        ({"weights": [], "pads": []}, ValueError, "weights: expected one part or more"),
        ({"weights": [torch.zeros(4, 2, 3, 3)]}, ValueError, r"weights\[0\]: expected shape \(filters, 3, height"),
        ({"weights": [torch.zeros(0, 3, 3, 3)]}, ValueError, r"weights\[0\]: expected shape"),
        ({"weights": [WEIGHT.double()]}, TypeError, r"weights\[0\]: .*float32.* got .*float64"),
        ({"weights": [[1.0]]}, TypeError, r"weights\[0\]: .* got list"),
        ({"biases": [torch.zeros(3)]}, ValueError, r"biases\[0\]: expected shape \(4,\), got shape \(3,\)"),
        ({"biases": [torch.zeros(4)] * 2}, ValueError, "weights: expected .* 2 biases"),
        ({"pads": [(1, 1, 1)]}, ValueError, r"pads\[0\]: expected four numbers, got \(1, 1, 1\)"),
        ({"pads": [(-4, -4, 1, 1)]}, ValueError, r"pads\[0\]: expected results of one size"),
        ({"weights": [WEIGHT] * 2, "pads": [(1,) * 4, (0,) * 4]}, ValueError, r"pads\[1\]: .*one size"),
        ({"stride": (0, 1)}, ValueError, r"stride: expected two positive numbers, got \(0, 1\)"),
        ({"dilation": (2**62, 1), "weights": [torch.zeros(4, 3, 5, 1)]}, ValueError, r"pads\[0\]: .*one size"),
        ({"dilation": (1,)}, ValueError, r"dilation: expected two positive numbers, got \(1,\)"),
        ({"order": torch.tensor([0, 1, 2])}, ValueError, r"order: expected shape \(4,\)"),
        ({"add": 1.0}, TypeError, "add: expected a tensor on cpu, got float"),
        ({"add": torch.zeros(2, 4, 8, 8, device="meta")}, TypeError, "add: expected a tensor on cpu, got .* meta"),
        ({"add": torch.zeros(3, 8, 8)}, ValueError, r"add: .* the result's \(2, 4, 8, 8\), got shape \(3, 8"),
        ({"order": torch.zeros(4)}, TypeError, "order: expected an int64 tensor"),
        ({"order": torch.tensor([0, 1, 1, 3])}, RuntimeError, "order: expected each of 0 to 3 once"),
        ({"order": torch.tensor([0, 1, 4, 3])}, RuntimeError, "order: expected each of 0 to 3 once"),
    ],
)
def test_bad_input_is_named(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    for backend in ("native", "reference"):
        with loco_ext.backend(backend), pytest.raises(error, match=text):
            mixed_conv2d(**arguments(**changed))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_parts_may_come_from_an_iterator(backend: str) -> None:
    with loco_ext.backend(backend):
        x, weight, bias = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 1, 1), torch.full((1,), 7.0)
        assert mixed_conv2d(x, iter([weight]), iter([bias]), iter([(0,) * 4])).unique().tolist() == [8.0]
