"""Activations of NCHW images on GPUs: the transposing kernel in Triton's interpreter, and the layers that use it."""

import copy
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import loco_ext
from loco_ext.nn import LocallyConnected1d, LocallyConnected2d, LocallyConnected3d
from loco_ext.ops import backends, block_sparse
from tests.covering import covering, slow
from tests.tolerances import same_bits
from tests.triton_runs import Guarded, interpret, let_triton_serve_cpus, needs_mmap, needs_triton, reserved

pytestmark = needs_triton

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


# ---- the kernel


def plain(x: Tensor) -> Tensor:
    """Return the same numbers with dimension 1 adjacent in memory, as in each of these layouts."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def cut_out(x: Tensor) -> Tensor:
    wide = torch.full((x.shape[0] + 1, x.shape[2] + 2, x.shape[1] + 3), torch.nan, dtype=x.dtype)
    wide[1:, 1:-1, 2:-1] = x.transpose(1, 2)
    return wide[1:, 1:-1, 2:-1].transpose(1, 2)


def samples_innermost(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def negated(x: Tensor) -> Tensor:
    """Return a view whose numbers are the negatives of what is in memory."""
    return torch._neg_view(plain(-x))


def expanded(x: Tensor) -> Tensor:
    return plain(x[:1, :, :1]).expand_as(x)


def negated_and_expanded(x: Tensor) -> Tensor:
    return torch._neg_view(plain(-x[:, :, :1])).expand_as(x)


def run(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Transpose a tensor, in the interpreter's process, and assert that nothing else is written."""
    from loco_ext.triton_kernels.block_sparse import block_sparse_transposed

    empty, before = Guarded(torch.empty), x.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        result = block_sparse_transposed(x, dtype)
    assert same_bits(x.resolve_neg(), before.resolve_neg()), "the operand was written"
    empty.check()
    return result


FUNCTIONS = plain, cut_out, samples_innermost, negated, expanded, negated_and_expanded
LAYOUTS = {function.__name__: function for function in FUNCTIONS}


@pytest.mark.parametrize(
    ("shape", "layout", "dtypes"),
    covering(
        [
            (1, 1, 1),
            (2, 1, 67),
            (3, 67, 1),
            (2, 5, 7),
            (2, 64, 16),
            (3, 131, 67),
            (1, 4099, 3),
            (1, 3, 4099),
            (0, 3, 4),
        ],
        list(LAYOUTS),
        [(F64, F64), (F32, F32), (BF16, BF16), (F16, F16), (F32, F16), (F32, BF16), (F16, F32), (BF16, F32)],
    ),
    ids=str,
)
def test_the_kernel_copies_every_bit(interpreter_process: ProcessPoolExecutor, shape, layout, dtypes):
    numbers = torch.randn(shape)
    if BF16 in dtypes:  # the interpreter does not round to bfloat16 as GPUs do
        numbers = numbers.bfloat16()
    x = LAYOUTS[layout](numbers.to(dtypes[0]))
    found = interpret(interpreter_process, run, x, dtypes[1])
    assert found.is_contiguous()
    assert same_bits(found, x.to(dtypes[1]).resolve_neg())


def far_rows() -> tuple[Tensor, Tensor]:
    """Return, in the interpreter's process, activations transposed that span 2^31 elements along two axes, and them."""
    from loco_ext.triton_kernels.block_sparse import block_sparse_transposed

    strides = (2**30 + 5, 1, 2**30 - 1)
    x = reserved(2 * strides[0] + 3 * strides[2] + 5, F16).as_strided((3, 5, 4), strides).copy_(torch.randn(3, 5, 4))
    return block_sparse_transposed(x, F32), x.contiguous()


@needs_mmap
def test_activations_that_lie_farther_apart_than_2_to_the_31(interpreter_process: ProcessPoolExecutor):
    found, x = interpret(interpreter_process, far_rows)
    assert same_bits(found, x.float())


# ---- layers


class Copies(TorchDispatchMode):
    """Dispatch mode that records the shapes and dtypes of the activations that torch copies or casts."""

    def __init__(self, activations: set[int]) -> None:
        super().__init__()
        self.activations, self.made = activations, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.name().split("::")[1].split(".")[0]
        if name in ("clone", "_to_copy", "copy_") and result.numel() in self.activations:
            self.made.append((tuple(result.shape), result.dtype))
        return result


def train(layer: Any, x: Tensor, grad: Tensor, dtype: torch.dtype | None) -> tuple[list[Tensor], Any, Any]:
    """Run a layer with the GPU's kernels, in the interpreter's process; ``dtype`` is autocast's.

    Returns:
        Output and gradients; then, for the forward and the backward pass, what the kernel transposed in it and what
        torch copied.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    run_triton = block_sparse._run_triton
    transposed: list[tuple[tuple[int, ...], torch.dtype]] = []

    def run_quietly(name: str, *arguments: Any) -> Tensor:
        with _disable_current_modes():
            result = run_triton(name, *arguments)
        if name == "block_sparse_transposed":
            transposed.append((tuple(result.shape), result.dtype))
        return result

    copies = Copies({x.numel(), grad.numel()})
    leaves, grad = (x.requires_grad_(), *layer.parameters()), grad.to(dtype)
    with pytest.MonkeyPatch.context() as patch, loco_ext.backend("triton"):
        use_gpu_kernels(patch)
        patch.setattr(block_sparse, "_run_triton", run_quietly)
        with copies:
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                y = layer(x)
            assert not (transposed and y._is_view()), "operations in place would copy the output in their backward"
            forward = [*transposed], [*copies.made]
            gradients = torch.autograd.grad(y, leaves, grad, create_graph=dtype is None)
            backward = transposed[len(forward[0]) :], copies.made[len(forward[1]) :]
        found = [y, *gradients]
        if dtype is None:
            found += torch.autograd.grad(sum(each.square().sum() for each in gradients), leaves[:2])
    return [t.detach() for t in found], forward, backward


def use_gpu_kernels(patch: pytest.MonkeyPatch) -> None:
    """Let the Triton kernels serve CPU tensors, also for activations with few elements."""
    let_triton_serve_cpus(patch)
    patch.setattr(backends, "library", None)
    patch.setattr(block_sparse, "_LEAST_TRANSPOSED", 0)


LAYERS = {
    "1d": lambda dtype: LocallyConnected1d(3, 4, 3, input_size=7, dtype=dtype),
    "2d": lambda dtype: LocallyConnected2d(3, 4, 3, padding=1, input_size=(4, 3), dtype=dtype),
    "3d, groups": lambda dtype: LocallyConnected3d(4, 6, 2, groups=2, input_size=(3, 2, 3), dtype=dtype),
    "depthwise": lambda dtype: LocallyConnected2d(5, 5, 3, groups=5, input_size=(4, 4), dtype=dtype),
    "1 channel": lambda dtype: LocallyConnected2d(1, 1, 3, padding=1, input_size=3, dtype=dtype),
    "1 pixel": lambda dtype: LocallyConnected2d(4, 3, 3, padding=1, input_size=1, dtype=dtype),
}


def expected(layer: torch.nn.Module, x: Tensor, grad: Tensor, second: bool = False) -> list[Tensor]:
    """Return the output, the gradients and theirs in float64, from the reference."""
    layer, x = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    leaves = (x, *layer.parameters())
    with loco_ext.backend("reference"):
        y = layer(x)
        found = [y, *torch.autograd.grad(y, leaves, grad.double(), create_graph=second)]
        if second:
            found += torch.autograd.grad(sum(each.square().sum() for each in found[1:]), leaves[:2])
    return [t.detach() for t in found]


def images(layer: Any, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return an input of the layer and a gradient of its output."""
    x = torch.randn(batch, layer.in_channels, *layer.input_size, dtype=dtype)
    return x, torch.randn(batch, layer.out_channels, *layer.output_size, dtype=dtype)


def sizes(layer: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the pixels and channels of the layer's input and of its output."""
    return (layer.pattern.n_in, layer.in_channels), (layer.pattern.n_out, layer.out_channels)


@pytest.mark.parametrize(
    ("name", "batch"),
    [("1d", 2), ("2d", 0), ("1 channel", 2), *map(slow, [("3d, groups", 2), ("depthwise", 2), ("1 pixel", 2)])],
)
def test_a_training_step_transposes_each_activation_once_with_no_copy_by_torch(interpreter_process, name, batch):
    """Images of one channel or one pixel, or without a sample, are not transposed at all."""
    layer = LAYERS[name](F64)
    x, grad = images(layer, batch, F64)
    found, forward, backward = interpret(interpreter_process, train, layer, x, grad, None)
    for one, other in zip(found, expected(layer, x, grad, second=True), strict=True):
        torch.testing.assert_close(one, other)
    assert found[0].stride() == x.new_empty(found[0].shape).stride()
    if name in ("1 channel", "1 pixel"):
        assert (forward[0], backward) == ([], ([], []))
        return
    if batch:
        assert found[1].stride() == x.stride()
        (n_in, c_in), (n_out, c_out) = sizes(layer)
        assert forward == ([((2, n_in, c_in), F64), ((2, c_out, n_out), F64)], [])
        assert backward == ([((2, n_out, c_out), F64), ((2, c_in, n_in), F64)], [])


@pytest.mark.parametrize("name", ["2d", slow("depthwise")])
def test_under_autocast_the_kernel_casts(interpreter_process, name):
    layer = LAYERS[name](F32)
    x, grad = images(layer, 2, F32)
    found, forward, backward = interpret(interpreter_process, train, layer, x, grad, F16)
    assert [t.dtype for t in found] == [F16, F32, F32, F32]
    for one, other in zip(found, expected(layer, x, grad), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-2, atol=2e-2)
    assert found[1].stride() == x.stride()
    (n_in, c_in), (n_out, c_out) = sizes(layer)
    assert forward == ([((2, n_in, c_in), F16), ((2, c_out, n_out), F16)], [])
    assert backward == ([((2, n_out, c_out), F16), ((2, c_in, n_in), F32)], [])


@pytest.mark.parametrize("autocast", [slow(None), F16])
def test_images_in_channels_last_are_not_transposed(interpreter_process, autocast):
    layer = LAYERS["2d"](F32)
    x, grad = (t.contiguous(memory_format=torch.channels_last) for t in images(layer, 2, F32))
    found, forward, backward = interpret(interpreter_process, train, layer, x, grad, autocast)
    tolerance = {"rtol": 1e-2, "atol": 2e-2} if autocast else {"rtol": 1e-4, "atol": 1e-4}
    for one, other in zip(found, expected(layer, x, grad, second=autocast is None), strict=True):
        torch.testing.assert_close(one.double(), other, **tolerance)
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    assert forward == ([], [(x.transpose(1, 3).flatten(1, 2).shape, F16)] if autocast else [])
    assert backward == ([], [(x.transpose(1, 3).flatten(1, 2).shape, F32)] if autocast else [])


# ---- where torch copies, as before


@pytest.fixture
def gpu_kernels(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    """Choose the GPU's kernels, yet run the CPU's operators; transposing, which is not one of them, fails."""
    monkeypatch.setattr(backends, "choose", lambda *_: "triton")
    monkeypatch.setattr(block_sparse, "_LEAST_TRANSPOSED", 0)


def test_small_activations_are_copied_by_torch(gpu_kernels, monkeypatch):
    layer = LAYERS["2d"](F32)
    x, grad = images(layer, 2, F32)
    with pytest.raises(NotImplementedError, match="block_sparse_transposed"):
        layer(x)
    monkeypatch.setattr(block_sparse, "_LEAST_TRANSPOSED", max(x.numel(), grad.numel()) + 1)
    torch.autograd.grad(layer(x), layer.weight, grad)


def test_compilers_and_exporters_get_torchs_copy(gpu_kernels, monkeypatch):
    layer = LAYERS["2d"](F32)
    x, grad = images(layer, 2, F32)
    leaves = (x.requires_grad_(), layer.weight)
    with loco_ext.backend("native"):
        found = torch.autograd.grad(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), leaves, grad)
        torch.export.export(layer, (x,))
    image = x.detach().contiguous(memory_format=torch.channels_last)
    assert "aten::clone" in str(torch.jit.trace(block_sparse.contiguous, image, check_trace=False).graph)
    monkeypatch.undo()
    for one, other in zip(found, expected(layer, x, grad)[1:3], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def derivatives(layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """Return derivatives of the layer by torch.func: each sample's gradient, a Jacobian, and a directional one."""
    each = torch.func.vmap(torch.func.grad(lambda x: layer(x).square().sum()))(x.unsqueeze(1))
    return [each, torch.func.jacrev(layer)(x), *torch.func.jvp(layer, (x,), (x,))]


def derivatives_with_gpu_kernels(layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patch, loco_ext.backend("triton"):
        use_gpu_kernels(patch)
        return [t.detach() for t in derivatives(layer, x)]


def test_transforms_go_through(interpreter_process):
    layer = LocallyConnected2d(2, 1, 2, input_size=(2, 3), dtype=F64)
    x, _ = images(layer, 2, F64)
    found = interpret(interpreter_process, derivatives_with_gpu_kernels, layer, x)
    with loco_ext.backend("reference"):
        torch.testing.assert_close(found, [t.detach() for t in derivatives(layer, x)])


def test_fake_tensors_have_the_strides_of_real_ones(gpu_kernels):
    with FakeTensorMode():
        x = torch.empty(2, 3, 5, 7, requires_grad=True)
        by_pixel = block_sparse._transposed(x.flatten(2).transpose(1, 2), BF16)
        y = block_sparse.contiguous(by_pixel.unflatten(1, (5, 7)).movedim(-1, 1))
        (found,) = torch.autograd.grad(y, x, torch.empty(2, 3, 5, 7, dtype=BF16))
    assert (by_pixel.dtype, by_pixel.stride()) == (BF16, (105, 3, 1))
    assert (y.dtype, y.stride()) == (BF16, x.stride())
    assert (found.dtype, found.stride()) == (F32, x.stride())
