"""Peers of locally connected layers for their benchmark: unfold and bmm, torch's BSR, a dense matrix, JAX.

Each peer is built from the layer's geometry and our values, so that all compute the same. One-time work, such as a
peer's own layout of the weights, is part of the construction and not timed.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import unfold

from loco_ext.geometry import BlockPattern

# Maximum size of a dense matrix; larger ones are left out.
MOST_ELEMENTS = 2**28


@dataclass(frozen=True)
class Layer:
    """Geometry of a convolution: square images and kernels, the same padding on all sides."""

    channels_in: int
    channels_out: int
    size: int
    kernel: int
    stride: int = 1
    padding: int = 1
    groups: int = 1

    @property
    def out_size(self) -> int:
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1

    def taps(self) -> Tensor:
        """Return the input pixel that each tap of each output pixel reads, [n_out, taps]; -1 in the padding."""
        pixels = torch.arange(1, self.size**2 + 1, dtype=torch.float64).view(1, 1, self.size, self.size)
        return unfold(pixels, self.kernel, padding=self.padding, stride=self.stride)[0].long().t() - 1

    def pattern(self) -> BlockPattern:
        """Return the pattern of the pairs of output and input pixels that are connected."""
        size = (self.size, self.size)
        return BlockPattern.from_conv(size, self.kernel, stride=self.stride, padding=self.padding)


@dataclass(frozen=True)
class Problem:
    """A layer with its own values for each pair, and a batch."""

    layer: Layer
    pattern: BlockPattern
    x: Tensor  # [N, C_in, H, W]
    values: Tensor  # [nnz, groups, C_in / groups, C_out / groups]
    grad: Tensor  # [N, C_out, H', W']


@dataclass(frozen=True)
class Candidate:
    """A forward pass and, where there is one, a forward with backward; converts its output to [N, C_out, H', W']."""

    forward: Callable[[], Any]
    training: Callable[[], Any] | None
    result: Callable[[Any], Tensor]


def by_tap(problem: Problem) -> Tensor:
    """Return the values of every tap of every output pixel, zeros in the padding: [n_out, taps, C_in, C_out]."""
    taps = problem.layer.taps()
    every = problem.values.new_zeros(*taps.shape, *problem.values.shape[2:])
    every[taps >= 0] = problem.values[:, 0]
    return every


def trained(forward: Callable[[], Tensor], leaves: Sequence[Tensor], grad: Tensor) -> Candidate:
    """Return a candidate with autograd's backward pass and the gradients of all leaves."""

    def without_graph() -> Tensor:
        with torch.no_grad():
            return forward()

    return Candidate(
        without_graph, lambda: torch.autograd.grad(forward(), leaves, grad), lambda result: result.view(grad.shape)
    )


def unfold_bmm(problem: Problem) -> Candidate:
    """Return unfold and bmm: patches of the whole batch, and one product per output pixel."""
    layer = problem.layer
    x = problem.x.clone().requires_grad_()
    # unfold puts the channels before the taps.
    weight = by_tap(problem).transpose(1, 2).flatten(1, 2).contiguous().requires_grad_()  # [n_out, C_in * taps, C_out]

    def forward() -> Tensor:
        patches = unfold(x, layer.kernel, padding=layer.padding, stride=layer.stride)  # [N, C_in * taps, n_out]
        return torch.bmm(patches.permute(2, 0, 1), weight).permute(1, 2, 0)

    return trained(lambda: forward().reshape(problem.grad.shape), [x, weight], problem.grad)


def _matrix(problem: Problem) -> Tensor:
    """Return the dense matrix, [n_out * C_out, n_in * C_in]."""
    n_out, n_in = problem.pattern.n_out, problem.pattern.n_in
    blocks = problem.values.new_zeros(n_out, n_in, *problem.values.shape[2:])
    blocks[problem.pattern.row_indices, problem.pattern.col_indices] = problem.values[:, 0]
    return blocks.permute(0, 3, 1, 2).reshape(n_out * problem.layer.channels_out, -1)


def _by_pixel(image: Tensor) -> Tensor:
    """Return images as [N, pixels * channels]."""
    return image.permute(0, 2, 3, 1).flatten(1)


def dense(problem: Problem) -> Candidate:
    """Return one product with a dense matrix."""
    weight, x = _matrix(problem).requires_grad_(), _by_pixel(problem.x).requires_grad_()
    candidate = trained(lambda: x @ weight.t(), [x, weight], _by_pixel(problem.grad))
    return Candidate(candidate.forward, candidate.training, lambda y: _as_image(y, problem))


def _as_image(y: Tensor, problem: Problem) -> Tensor:
    batch, channels, *size = problem.grad.shape
    return y.view(batch, *size, channels).permute(0, 3, 1, 2)


def torch_bsr(problem: Problem) -> Candidate:
    """Return torch's own BSR tensor times the batch; on a CPU it has no backward pass."""
    size = (problem.grad[0].numel(), problem.x[0].numel())
    blocks = problem.values[:, 0].mT.contiguous()
    weight = torch.sparse_bsr_tensor(problem.pattern.crow_indices, problem.pattern.col_indices, blocks, size)
    x = _by_pixel(problem.x).t().contiguous()
    return Candidate(lambda: weight @ x, None, lambda y: _as_image(y.t().contiguous(), problem))


def jax_local(problem: Problem) -> Candidate:
    """Return JAX's locally connected layer, compiled by XLA."""
    jax, numpy = importlib.import_module("jax"), importlib.import_module("jax.numpy")
    layer = problem.layer
    # JAX puts the channels before the taps.
    weight = numpy.asarray(by_tap(problem).permute(3, 2, 1, 0).flatten(1, 2).contiguous().numpy())
    weight = weight.reshape(*weight.shape[:2], layer.out_size, layer.out_size)
    x, grad = numpy.asarray(problem.x.numpy()), numpy.asarray(problem.grad.numpy())

    def local(x: Any, weight: Any) -> Any:
        padding = [(layer.padding, layer.padding)] * 2
        return jax.lax.conv_general_dilated_local(
            x, weight, (layer.stride,) * 2, padding, (layer.kernel,) * 2, dimension_numbers=("NCHW", "OIHW", "NCHW")
        )

    def gradients(x: Any, weight: Any, grad: Any) -> Any:
        y, backward = jax.vjp(local, x, weight)
        return y, backward(grad)

    forward, training = jax.jit(local), jax.jit(gradients)
    return Candidate(
        lambda: forward(x, weight).block_until_ready(),
        lambda: jax.block_until_ready(training(x, weight, grad)),
        torch.from_dlpack,
    )


PEERS: dict[str, Callable[[Problem], Candidate]] = {
    "unfold+bmm": unfold_bmm,
    "torch BSR": torch_bsr,
    "dense": dense,
    "JAX": jax_local,
}


def cannot(name: str, layer: Layer) -> str | None:
    """Return why a peer cannot run a layer; None if it can."""
    if layer.groups != 1:
        return "no groups"
    if name == "JAX" and find_spec("jax") is None:
        return "jax is not installed"
    if name == "torch BSR" and layer.channels_in != layer.channels_out:
        return "square blocks only"
    elements = layer.channels_in * layer.size**2 * layer.channels_out * layer.out_size**2
    if name == "dense" and elements > MOST_ELEMENTS:
        return f"a matrix of {elements:,} elements"
    return None
