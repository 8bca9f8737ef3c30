"""Problems for the tests of block-sparse products, and dense float64 references for them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loco_ext import ops
from loco_ext.geometry import BlockPattern
from tests.tolerances import assert_sum_of_products

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def pattern_of(live: Tensor) -> BlockPattern:
    """Return the pattern of the pairs marked in ``live``, bool ``[n_out, n_in]``."""
    crow = torch.zeros(len(live) + 1, dtype=torch.int64)
    crow[1:] = live.sum(1).cumsum(0)
    return BlockPattern(crow, live.nonzero()[:, 1].contiguous(), live.shape[1])


def conv_pattern(size: int, kernel: int) -> Tensor:
    """Return the live pairs of a square convolution whose zero padding keeps the size, ``[size**2, size**2]``."""
    at = torch.arange(size)
    near = (at[:, None] - at[None, :]).abs() <= kernel // 2
    return (near[:, None, :, None] & near[None, :, None, :]).reshape(size**2, size**2)


@dataclass(frozen=True)
class Case:
    """Sizes of one problem and the choice of its live pairs: a random share of all, or those of a convolution.

    With a ``reach``, each row's pairs are drawn from a window of that many pixels, which advances from row to row.
    """

    batch: int
    groups: int
    depth: int  # input channels of a group
    width: int  # output channels of a group
    n_out: int = 5
    n_in: int = 6
    share: float = 0.5
    kernel: int = 0
    reach: int = 0
    shuffled: bool = False  # whether a convolution's rows are in random order

    def live(self) -> Tensor:
        """Return the live pairs, bool ``[n_out, n_in]``; random ones, unless all, leave a row and a column empty."""
        if self.kernel:
            live = conv_pattern(round(self.n_out**0.5), self.kernel)
            return live[torch.randperm(self.n_out)] if self.shuffled else live
        live = torch.rand(self.n_out, self.n_in) < self.share
        if self.reach:
            starts = torch.linspace(0, self.n_in - self.reach, self.n_out).long()[:, None]
            live &= (torch.arange(self.n_in) >= starts) & (torch.arange(self.n_in) < starts + self.reach)
        if self.share < 1:
            live[self.n_out // 2] = False
            live[:, self.n_in // 3] = False
        return live


CASES = {
    "one of everything": Case(1, 1, 1, 1, 1, 1, 1.0),
    "one sample, whole vectors": Case(1, 1, 64, 64),
    "rgb": Case(7, 1, 3, 64),  # the depth is odd and less than a vector
    "back to rgb": Case(7, 1, 64, 3),
    "rgb, whole vectors": Case(20, 1, 3, 64, 16, 16, kernel=3),  # the gradient of x has few channels
    "few channels, groups": Case(13, 3, 2, 32),
    "few channels, not whole vectors": Case(13, 1, 4, 40),
    "rgb, side by side": Case(9, 1, 3, 64, 25, 25, kernel=3),
    "rgb, even runs": Case(5, 1, 3, 70, 16, 36, 0.9),
    "short, several strips": Case(5, 1, 7, 20, 6, 300, 0.97),
    "not a multiple of anything": Case(13, 1, 37, 29),
    "100 channels": Case(4, 1, 100, 100),  # a depth has two strips and two panels
    "deep": Case(3, 1, 700, 16, 2, 3),  # a depth has several strips in place, too
    "even groups": Case(5, 4, 16, 32),
    "odd groups": Case(5, 3, 5, 7),
    "pairs of groups": Case(6, 2, 1, 2),
    "depthwise": Case(9, 70, 1, 1),
    "depthwise, whole vectors": Case(5, 64, 1, 1, 9, 9, kernel=3),
    "depthwise, whole lines": Case(23, 70, 1, 1, 25, 25, kernel=3),
    "depthwise, several parts": Case(17, 21, 1, 1, 49, 49, kernel=7),
    "depthwise, rows that reach far": Case(7, 3, 1, 1, 12, 6000, 0.01),
    "depthwise, rows far from each other": Case(7, 3, 1, 1, 64, 6000, 0.6, reach=600),
    "depthwise, rows in any order": Case(13, 21, 1, 1, 81, 81, kernel=3, shuffled=True),
    "depthwise, all of many pixels": Case(7, 3, 1, 1, 4, 3000, 1.0),
    "large batch": Case(300, 1, 16, 16, 3, 4),  # the batch has several panels
    "large batch, many rows": Case(260, 1, 4, 4, 70, 4),
    "large odd batch": Case(259, 1, 5, 6, 3, 4),
    "full": Case(3, 1, 8, 8, 4, 5, 1.0),
    "convolution": Case(3, 1, 16, 16, 16, 16, kernel=3),
    "many entries": Case(2, 1, 4, 4, 49, 49, kernel=7),
    "no entries": Case(3, 1, 4, 4, 5, 6, 0.0),
    "no sample": Case(0, 1, 4, 4),
}


@dataclass
class Problem:
    """Operands in float64 that the dtype represents exactly."""

    live: Tensor
    pattern: BlockPattern
    x: Tensor
    values: Tensor
    bias: Tensor
    grad: Tensor

    def operands(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return x, values, bias and the gradient of the product in the dtype."""
        return tuple(tensor.to(dtype) for tensor in (self.x, self.values, self.bias, self.grad))


def make_problem(case: Case, dtype: torch.dtype = torch.float64) -> Problem:
    """Return a problem with random float64 operands that ``dtype`` represents exactly, from torch's generator."""
    live = case.live()
    pattern = pattern_of(live)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype).double()

    channels_in, channels_out = case.groups * case.depth, case.groups * case.width
    return Problem(
        live,
        pattern,
        draw(case.batch, pattern.n_in, channels_in),
        draw(pattern.nnz, case.groups, case.depth, case.width),
        draw(pattern.n_out, channels_out),
        draw(case.batch, pattern.n_out, channels_out),
    )


def dense_matmul(x: Tensor, values: Tensor, bias: Tensor | None, live: Tensor) -> Tensor:
    """Return the product by the dense matrix that holds all blocks in their places, ``[N, n_out, C_out]``."""
    (n_out, n_in), (_, groups, depth, width) = live.shape, values.shape
    blocks = values.new_zeros(n_out, n_in, groups, depth, width).index_put(tuple(live.nonzero().unbind(1)), values)
    channels = torch.eye(groups, dtype=values.dtype)
    matrix = torch.einsum("oigdw,gh->igdohw", blocks, channels)
    y = x.flatten(1) @ matrix.reshape(n_in * groups * depth, n_out * groups * width)
    y = y.view(len(x), n_out, groups * width)
    return y if bias is None else y + bias


def dense_results(problem: Problem) -> tuple[Tensor, ...]:
    """Return the product, and the gradients of x, values and bias."""
    operands = [tensor.clone().requires_grad_() for tensor in (problem.x, problem.values, problem.bias)]
    y = dense_matmul(*operands, problem.live)
    return y.detach(), *torch.autograd.grad(y, operands, problem.grad)


def sizes_of_terms(problem: Problem) -> tuple[Tensor, ...]:
    """Return the sum of the terms' magnitudes for each result of :func:`dense_results`."""
    sizes = (tensor.abs() for tensor in (problem.x, problem.values, problem.bias, problem.grad))
    return dense_results(Problem(problem.live, problem.pattern, *sizes))


def assert_is_dense(problem: Problem, found: Sequence[Tensor], dtype: torch.dtype, cut: float = 0.0) -> None:
    """Assert that as many results as are given are those of :func:`dense_results`, but for rounding."""
    every = dense_results(problem), sizes_of_terms(problem)
    for actual, expected, sizes in zip(found, *(each[: len(found)] for each in every), strict=True):
        assert actual.dtype == dtype
        assert actual.shape == expected.shape
        assert_sum_of_products(actual.cpu(), expected, sizes, cut)


def results(x: Tensor, values: Tensor, bias: Tensor, grad: Tensor, pattern) -> tuple[Tensor, ...]:
    """Return the product, and the gradients of x, values and bias."""
    operands = [tensor.detach().requires_grad_() for tensor in (x, values, bias)]
    y = ops.block_sparse_matmul(operands[0], operands[1], pattern, operands[2])
    return y.detach(), *torch.autograd.grad(y, operands, grad)


def spread(tensor: Tensor) -> Tensor:
    """Return the same numbers at every other position in memory."""
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), torch.nan, dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def shifted(tensor: Tensor) -> Tensor:
    """Return the same numbers, starting one element beyond an aligned address."""
    return torch.cat([torch.full((1,), torch.nan, dtype=tensor.dtype), tensor.flatten()])[1:].view(tensor.shape)


def channels_first(tensor: Tensor) -> Tensor:
    """Return the same numbers with the channels of a pixel far apart."""
    return tensor.transpose(1, -1).contiguous().transpose(1, -1)


def in_wider_pixels(tensor: Tensor) -> Tensor:
    """Return the same numbers with 3 others after each row of the last dimension."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), torch.nan, dtype=tensor.dtype)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def in_wider_rows(tensor: Tensor) -> Tensor:
    """Return the same numbers with 3 others after each entry of the first dimension, whose stride becomes odd."""
    return in_wider_pixels(tensor.flatten(1)).unflatten(1, tensor.shape[1:])


LAYOUTS = (spread, shifted, channels_first, in_wider_rows, in_wider_pixels)


def assert_only_readers_are_not_finite(y: Tensor, live: Tensor, pixel: Tensor) -> None:
    """Assert that of y, ``[N, n_out, C_out]``, sample 1 is not finite where it reads the input pixel, all else is."""
    touched = torch.zeros(y.shape[:2], dtype=torch.bool)
    touched[1] = live[:, pixel]
    assert torch.equal(~y.isfinite(), touched[..., None].expand_as(y))


# The cases left out differ in strips, lines and parts of the CPU's kernels; Triton's have one loop over live pairs, so
# that few pixels suffice.
TRITON_CASES = {
    "33 channels": Case(3, 1, 33, 33, 3, 4),
    "130 samples": Case(130, 1, 3, 100, 2, 3),
    "groups of 1 to 3": Case(20, 5, 1, 3, 2, 3, 1.0),
    "several entries": Case(2, 1, 4, 4, 9, 9, kernel=5),
    "depthwise, several parts": Case(17, 21, 1, 1, 9, 9, kernel=5),
    "depthwise, rows in any order": Case(13, 21, 1, 1, 16, 16, kernel=3, shuffled=True),
    **{
        name: replace(CASES[name], n_out=3, n_in=4)
        for name in (
            *("rgb", "back to rgb", "not a multiple of anything", "few channels, not whole vectors", "100 channels"),
            *("even groups", "odd groups", "pairs of groups", "depthwise"),
        )
    },
    **{name: CASES[name] for name in ("one of everything", "deep", "full", "no entries", "no sample")},
}
