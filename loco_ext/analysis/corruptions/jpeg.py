"""JPEG's lossy steps: colour transform, halved chroma, and quantised cosine transforms of blocks of 8x8 pixels.

The entropy coding loses nothing and is left out. Source: ITU-T T.81, annexes A and K; T.871 (JFIF) for the colours.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate, pad

# T.81, tables K.1 and K.2: quantisation of luminance and of chrominance, for quality 50.
LUMINANCE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
CHROMINANCE = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 8,) * 4,
)
# T.871: rows give Y, Cb and Cr of red, green and blue.
TO_YCBCR = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))


def compressed(images: Tensor, quality: int) -> Tensor:
    """Compress images [N, 1 or 3, H, W] with values in [0, 1] at a quality from 1 to 100, and decompress them.

    Chroma has half of the resolution on both axes (4:2:0), as is the default of most encoders.
    """
    levels = (255 * images).round()
    if images.shape[1] == 1:
        return _coded(levels - 128, LUMINANCE, quality).add(128).round() / 255
    matrix = torch.tensor(TO_YCBCR, dtype=torch.float64, device="cpu")
    y, *chroma = torch.einsum("ij,njhw->inhw", matrix.to(levels), levels).unsqueeze(2)
    height, width = images.shape[-2:]
    planes = [_coded(y.round() - 128, LUMINANCE, quality) + 128]
    for plane in chroma:
        whole = pad(plane, (0, width % 2, 0, height % 2), mode="replicate")
        coded = _coded(avg_pool2d(whole.round(), 2).round(), CHROMINANCE, quality)
        planes.append(interpolate(coded, scale_factor=2, mode="bilinear")[..., :height, :width])
    decoded = torch.einsum("ij,njhw->nihw", torch.linalg.inv(matrix).to(levels), torch.cat(planes, 1))
    return decoded.round() / 255


def _coded(plane: Tensor, table: tuple[tuple[int, ...], ...], quality: int) -> Tensor:
    """Return a plane [N, 1, H, W], with 0 in the middle of its range, after quantisation of its blocks' transforms."""
    height, width = plane.shape[-2:]
    whole = pad(plane, (0, -width % 8, 0, -height % 8), mode="replicate")
    blocks = whole.unflatten(-1, (-1, 8)).unflatten(-3, (-1, 8)).transpose(-2, -3)  # [N, 1, rows, columns, 8, 8]
    transform = _cosine_transform().to(plane)
    steps = _steps(table, quality).to(plane)
    quantised = (transform @ blocks @ transform.T / steps).round() * steps
    decoded = (transform.T @ quantised @ transform).transpose(-2, -3).flatten(-2).flatten(-3, -2)
    return decoded[..., :height, :width].round().clamp(-128, 127)


def _steps(table: tuple[tuple[int, ...], ...], quality: int) -> Tensor:
    """Return the quantisation steps of a quality, scaled as the Independent JPEG Group's encoder does."""
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    return ((torch.tensor(table, device="cpu") * percent + 50) // 100).clamp(1, 255)


def _cosine_transform() -> Tensor:
    """Return the orthonormal matrix of the cosine transform of 8 values (T.81, A.3.3)."""
    places = torch.arange(8, dtype=torch.float64, device="cpu")
    matrix = torch.cos((2 * places + 1) * places[:, None] * math.pi / 16) / 2
    matrix[0] /= math.sqrt(2)
    return matrix
