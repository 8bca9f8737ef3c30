"""The arithmetic of block patterns, on NumPy arrays of indices.

Images and kernels have three axes here, with leading ones of size 1 if there are fewer. A pattern is a pair of int64
arrays, ``crow`` and ``col``.
"""

import math

import numpy as np

Tables = tuple[np.ndarray, np.ndarray, np.ndarray]
Sizes = tuple[int, int, int]


def conv_pattern(pixels: Tables, image: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Return the pattern of a convolution. ``pixels[axis][output, tap]`` is the pixel it reads, -1 in the padding."""
    output, _, pixel = _reads(pixels, image)
    n_out = math.prod(len(table) for table in pixels)
    return _pattern(_distinct(output * math.prod(image) + pixel), n_out, math.prod(image))


def conv_taps(
    pixels: Tables, image: Sizes, crow: np.ndarray, col: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return block, tap and output pixel of each tap that reads a pixel whose block is in the pattern."""
    output, tap, pixel = _reads(pixels, image)
    n_in = math.prod(image)
    wanted, keys = output * n_in + pixel, _keys(crow, col, n_in)
    block = np.searchsorted(keys, wanted)
    there = np.append(keys, -1)[block] == wanted
    return block[there], tap[there], output[there]


def grow(
    crow: np.ndarray, col: np.ndarray, image: Sizes, radius: int, wraps: bool, seeds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's pixels, or its seed if it has none, and those at most ``radius`` away along every axis."""
    n_out, n_in = len(crow) - 1, math.prod(image)
    empty = np.flatnonzero(np.diff(crow) == 0)
    keys = np.concatenate([_keys(crow, col, n_in), empty * n_in + seeds[empty]])
    stride = n_in
    for size in image:
        stride //= size
        reached = 0
        while reached < min(radius, size):
            step = min(reached + 1, radius - reached)  # leaves no gaps between the shifted runs of pixels
            keys = _distinct(keys, *(_shifted(keys, stride, size, shift, wraps) for shift in (-step, step)))
            reached += step
    return _pattern(np.sort(keys), n_out, n_in)


def unite(
    crow: np.ndarray, col: np.ndarray, other_crow: np.ndarray, other_col: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the blocks of either pattern."""
    n_in = _width(col, other_col)
    keys = _distinct(_keys(crow, col, n_in), _keys(other_crow, other_col, n_in))
    return _pattern(keys, len(crow) - 1, n_in)


def locate(crow: np.ndarray, col: np.ndarray, whole_crow: np.ndarray, whole_col: np.ndarray) -> np.ndarray:
    """Return the index of each block in the whole pattern, which contains them all."""
    n_in = _width(col, whole_col)
    return np.searchsorted(_keys(whole_crow, whole_col, n_in), _keys(crow, col, n_in))


def transpose(crow: np.ndarray, col: np.ndarray, n_in: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the pattern by input pixel: where each one's entries begin, their output pixels, their blocks."""
    blocks = np.argsort(col, kind="stable").astype(np.int64)
    ends = np.cumsum(np.concatenate([[0], np.bincount(col, minlength=n_in)]), dtype=np.int64)
    return ends, _rows(crow)[blocks], blocks


def _reads(pixels: Tables, image: Sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return output pixel, tap and input pixel of every read, sorted in this order."""
    # Each table varies along its own axes of [outputs z, y, x, taps z, y, x].
    z, y, x = (np.expand_dims(table, [i for i in range(6) if i % 3 != axis]) for axis, table in enumerate(pixels))
    read = (z * image[1] + y) * image[2] + x
    live = (z >= 0) & (y >= 0) & (x >= 0)
    n_taps = math.prod(table.shape[1] for table in pixels)
    output, tap = live.reshape(-1, n_taps).nonzero()
    return output, tap, read.reshape(-1, n_taps)[output, tap]


def _rows(crow: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(crow) - 1), np.diff(crow))


def _width(col: np.ndarray, other: np.ndarray) -> int:
    return 1 + int(max(col.max(initial=0), other.max(initial=0)))


def _keys(crow: np.ndarray, col: np.ndarray, n_in: int) -> np.ndarray:
    """Return one number for each block, ascending with row and column."""
    return _rows(crow) * n_in + col


def _shifted(keys: np.ndarray, stride: int, size: int, shift: int, wraps: bool) -> np.ndarray:
    """Return the keys of the pixels ``shift`` further along an axis of the image, without those outside of it."""
    place = keys // stride % size
    if wraps:
        return keys + ((place + shift) % size - place) * stride
    return keys[(place >= -shift) & (place < size - shift)] + shift * stride


def _distinct(*keys: np.ndarray) -> np.ndarray:
    """Return all keys, each once, in ascending order."""
    every = np.concatenate(keys)
    every.sort(kind="stable")  # merges what is in order already, which is most
    return every[np.append(True, every[1:] != every[:-1])[: len(every)]]


def _pattern(keys: np.ndarray, n_out: int, n_in: int) -> tuple[np.ndarray, np.ndarray]:
    rows, col = np.divmod(keys, n_in)
    return np.cumsum(np.concatenate([[0], np.bincount(rows, minlength=n_out)]), dtype=np.int64), col
