"""Importance landscapes of images and the losses on them, in plain PyTorch and float64.

The functions take the arguments of the operators in :mod:`loco_ext.ops.landscape`, which describes them.

Backward: with ``I' = sqrt(HW) n / ||n||``, ``n = ||A||`` over channels and ``d = dL/dI'``,
``dL/dn = sqrt(HW) / ||n|| * (d - I' * mean(d * I'))`` and ``dL/dA = dL/dn * A / n``.
"""

import torch
from torch import Tensor
from torch.nn.functional import conv2d, conv_transpose2d, pad

from loco_ext.reference.dtypes import compute_dtype


def landscape(
    g: Tensor, weights: Tensor, stencil: Tensor, target: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, the landscape, its Laplacian, and the slope dL/dA."""
    dtype = compute_dtype(g.dtype)
    squares = torch.einsum("m,mchw->chw", weights.double(), g.double().square())  # A, [C, H, W]
    size = squares.amax()
    size = torch.where(size == 0, 1.0, size)  # A is divided by its largest number before it is squared
    squares = squares / size
    norms = torch.linalg.vector_norm(squares, dim=0)  # n, [H, W]
    total = torch.linalg.vector_norm(norms)
    factor = norms.numel() ** 0.5 / torch.where(total == 0, 1.0, total)
    image = norms * factor
    curvature = laplacian(image[None, None], stencil.double())[0, 0]
    if target is None:
        centred = curvature - curvature.mean()
        loss = centred.square().mean()
        d = _laplacian_backward(2 * centred / centred.numel(), stencil.double())
    else:
        difference = image - target.double()
        loss = difference.square().sum()
        d = 2 * difference
    by_norm = factor * (d - image * (d * image).mean())
    slope = torch.where(norms == 0, 0.0, by_norm / torch.where(norms == 0, 1.0, norms)) * squares / size
    return loss.to(dtype), image.to(dtype), curvature.to(dtype), slope


def landscape_backward(g: Tensor, weights: Tensor, slope: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the loss in ``g`` and ``weights``."""
    along = g.double() * (slope * grad.double())  # [M, C, H, W]
    u = 2 * along * weights.double().view(-1, 1, 1, 1)
    return u.to(g.dtype).contiguous(), (along * g.double()).sum((1, 2, 3)).to(weights.dtype)


def laplacian(images: Tensor, stencil: Tensor) -> Tensor:
    """Return the correlation of each channel with the stencil under reflect padding, ``(N, C, H, W)``."""
    reach = stencil.shape[0] // 2
    padded = pad(images, (reach,) * 4, mode="reflect")
    return conv2d(padded.flatten(0, 1)[:, None], stencil[None, None]).view_as(images)


def _laplacian_backward(grad: Tensor, stencil: Tensor) -> Tensor:
    """Return the gradient of the map whose Laplacian has the gradient ``grad``, ``(H, W)``."""
    padded = conv_transpose2d(grad[None, None], stencil[None, None])
    padding = [stencil.shape[0] // 2] * 4
    return torch.ops.aten.reflection_pad2d_backward(padded, grad[None, None], padding)[0, 0]
