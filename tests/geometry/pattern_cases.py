"""Random geometries of convolutions, and their patterns as dense matrices, derived from what torch itself reads."""

import math
import random
from dataclasses import dataclass

import torch
from torch.nn import functional

MODES = ("zeros", "circular", "reflect", "replicate")


@dataclass(frozen=True)
class Case:
    """Arguments of BlockPattern.from_conv, with the padding in pairs."""

    input_size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    padding_mode: str

    @property
    def arguments(self) -> tuple:
        return self.input_size, self.kernel_size, self.stride, self.padding, self.dilation, self.padding_mode


def random_case(generator: random.Random, symmetric: bool = False) -> Case:
    """Return a small random geometry that torch accepts; sometimes the kernel is as large as the padded image."""
    while True:
        axes = generator.randint(1, 3)
        mode = generator.choice(MODES)
        sizes = [generator.randint(1, (14, 8, 5)[axes - 1]) for _ in range(axes)]
        most = [{"zeros": 4, "circular": size, "reflect": size - 1, "replicate": 4}[mode] for size in sizes]
        pads = [(generator.randint(0, min(4, top)), generator.randint(0, min(4, top))) for top in most]
        if symmetric:
            pads = [(before, before) for before, _ in pads]
        kernel = [generator.randint(1, (7, 5, 3)[axes - 1]) for _ in range(axes)]
        dilation = [generator.randint(1, 3) for _ in range(axes)]
        stride = [generator.randint(1, 3) for _ in range(axes)]
        if all(d * (k - 1) < n + sum(p) for d, k, n, p in zip(dilation, kernel, sizes, pads, strict=True)):
            return Case(tuple(sizes), tuple(kernel), tuple(stride), tuple(pads), tuple(dilation), mode)


def read_pixels(case: Case) -> torch.Tensor:
    """Return the input pixel that each tap of each output pixel reads, -1 for padding: int64 [n_out, n_taps].

    The pixels are read from the windows of an image of pixel numbers that torch has padded.
    """
    image = torch.arange(math.prod(case.input_size), dtype=torch.float64).view(1, 1, *case.input_size)
    pads = [side for pair in reversed(case.padding) for side in pair]
    if case.padding_mode == "zeros":
        image = functional.pad(image, pads, value=-1.0)
    else:
        image = functional.pad(image, pads, mode=case.padding_mode)
    image = image[0, 0]
    for axis, (taps, step, gap) in enumerate(zip(case.kernel_size, case.stride, case.dilation, strict=True)):
        image = image.unfold(axis, gap * (taps - 1) + 1, step)[..., ::gap]
    return image.reshape(-1, math.prod(case.kernel_size)).long()


def embedding(case: Case) -> torch.Tensor:
    """Return 1 where a tap of an output pixel reads an input pixel, 0 elsewhere: float64 [n_out, n_in, n_taps]."""
    pixels = read_pixels(case)
    n_in = math.prod(case.input_size)
    return functional.one_hot(pixels + 1, n_in + 1)[..., 1:].transpose(1, 2).double()


def dense(pattern) -> torch.Tensor:
    """Return whether each pair of pixels has a block: bool [n_out, n_in]."""
    crow, col = pattern.crow_indices.tolist(), pattern.col_indices.tolist()
    matrix = torch.zeros(pattern.n_out, pattern.n_in, dtype=torch.bool)
    for row in range(pattern.n_out):
        columns = col[crow[row] : crow[row + 1]]
        assert columns == sorted(set(columns))
        matrix[row, columns] = True
    return matrix


def near(case: Case, radius: int) -> torch.Tensor:
    """Return whether two input pixels are at most radius apart along every axis: bool [n_in, n_in]."""
    coordinates = torch.cartesian_prod(*map(torch.arange, case.input_size)).view(-1, len(case.input_size))
    apart = (coordinates[:, None] - coordinates[None]).abs()
    if case.padding_mode == "circular":
        apart = torch.minimum(apart, torch.tensor(case.input_size) - apart)
    return (apart <= radius).all(-1)


def grown(case: Case, matrix: torch.Tensor, radius: int) -> torch.Tensor:
    """Return the dense pattern, each row spread by the radius; an empty row grows from the pixel nearest its middle."""
    if radius == 0:
        return matrix
    seeded = matrix.clone()
    for row in (~matrix.any(1)).nonzero().flatten().tolist():
        seeded[row, middle(case, row)] = True
    return seeded.double() @ near(case, radius).double() > 0


def middles(case: Case, row: int) -> list[float]:
    """Return the coordinates of the middle of an output pixel's receptive field in the input."""
    places = []
    for axis in reversed(range(len(case.input_size))):
        outputs = (
            case.input_size[axis] + sum(case.padding[axis]) - case.dilation[axis] * (case.kernel_size[axis] - 1) - 1
        ) // case.stride[axis] + 1
        row, output = divmod(row, outputs)
        taps = [
            output * case.stride[axis] - case.padding[axis][0] + case.dilation[axis] * tap
            for tap in range(case.kernel_size[axis])
        ]
        places.append(sum(taps) / len(taps))
    return places[::-1]


def middle(case: Case, row: int) -> int:
    """Return the input pixel nearest to that middle; of two along an axis, the one before it."""
    pixel = 0
    for place, size in zip(middles(case, row), case.input_size, strict=True):
        laps = (-2, -1, 0, 1, 2) if case.padding_mode == "circular" else (0,)
        reach = [(abs(i + lap * size - place), i + lap * size, i) for i in range(size) for lap in laps]
        pixel = pixel * size + min(reach)[2]
    return pixel
