"""Importance landscapes: where in the image a network's outputs react, as one map, and the losses that flatten it.

With the gradients g of M samples' outputs in their images and the weights w of the samples::

    A = sum_m w_m g_m^2                            squared gradients, (C, H, W)
    n = ||A||_2 over the channels                  (H, W)
    I' = sqrt(H W) n / ||n||_F                     the landscape, whose mean square is 1
    L = variance of the Laplacian of I'            without a target (the variance is biased)
    L = ||I' - target||^2                          with a target

Sums are in float64 whatever the dtype of g, so fourth powers of gradients neither overflow nor vanish. A landscape of
gradients that are all zero is zero, and so is its gradient.
"""

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loco_ext.argument_checks import check_memory, check_tensor
from loco_ext.ops import backends
from loco_ext.reference import landscape as _reference
from loco_ext.reference.dtypes import compute_dtype

_FAMILY = "landscape"


class Landscape(NamedTuple):
    """Result of :func:`landscape`.

    Attributes:
        loss: scalar; differentiable once in ``g`` and ``weights``.
        map: the landscape I', ``(H, W)``; not differentiable.
        laplacian: the Laplacian of the map, ``(H, W)``; not differentiable.

    Example:
        >>> import torch
        >>> from loco_ext import ops
        >>> ops.landscape(torch.ones(2, 1, 4, 4)).map.mean()
        tensor(1.)
    """

    loss: Tensor
    map: Tensor
    laplacian: Tensor


def laplacian_stencil(width: int) -> Tensor:
    """Return the stencil of the k-Laplacian, ``(k, k)`` in float64 on the CPU: ones, with ``1 - k^2`` in the centre.

    Example:
        >>> from loco_ext.ops.landscape import laplacian_stencil
        >>> laplacian_stencil(3)[1].tolist()
        [1.0, -8.0, 1.0]
    """
    stencil = torch.ones(width, width, dtype=torch.float64, device="cpu")
    stencil[width // 2, width // 2] = 1 - width**2
    return stencil


def landscape(
    g: Tensor, weights: Tensor | None = None, stencil: Tensor | None = None, target: Tensor | None = None
) -> Landscape:
    """Return the importance landscape of gradients, its Laplacian under reflect padding, and the loss.

    Args:
        g: ``(M, C, H, W)``: float32, float64, bfloat16 or float16.
        weights: ``(M,)``, at least 0, float32 or float64; None weights each sample by ``1 / M``.
        stencil: square, of odd width, ``(k, k)``, with ``k // 2 < min(H, W)``; None for the 3-Laplacian.
        target: ``(H, W)``, or None for the curvature loss.

    Returns:
        Loss, map and Laplacian, in float64 for float64 gradients, else in float32.

    Raises:
        TypeError: a wrong dtype, layout or device.
        ValueError: shapes that do not fit.

    Source:
        "PILCRO: Making Importance Landscapes Flat Again", eqs. 6, 8 and 9.

    Example:
        >>> import torch
        >>> from loco_ext import ops
        >>> flat = ops.landscape(torch.ones(2, 3, 8, 8))
        >>> flat.loss.item(), ops.landscape(torch.ones(2, 3, 8, 8), target=torch.zeros(8, 8)).loss.item()
        (0.0, 64.0)
    """
    _check_gradients(g)
    if weights is None:
        weights = torch.full((len(g),), 1.0 / max(len(g), 1), dtype=torch.float64, device=g.device)
    stencil = (laplacian_stencil(3) if stencil is None else stencil).to(g.device, torch.float64)
    check_operands(g, weights, stencil, target)
    loss, image, laplacian, _slope = torch.ops.loco_ext.landscape(g, weights, stencil, target)
    return Landscape(loss, image, laplacian)


def _check_gradients(g: Any) -> None:
    check_tensor("g", g)
    check_memory("g", g)
    if g.dim() != 4 or g.shape[1:].numel() == 0:
        raise ValueError(f"g: expected shape (M, C, H, W) with at least one pixel, got {tuple(g.shape)}")


def check_operands(g: Tensor, weights: Tensor, stencil: Tensor, target: Tensor | None) -> None:
    """Raise TypeError or ValueError unless the other arguments fit images of shape ``g.shape``, on its device."""
    if weights.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"weights: expected float32 or float64, got {weights.dtype}")
    if weights.shape != g.shape[:1]:
        raise ValueError(f"weights: expected shape ({len(g)},), one for each sample of g, got {tuple(weights.shape)}")
    check_stencil("stencil", stencil, g)
    if target is not None:
        check_target(target, g)
    backends.check_one_device(g=g, weights=weights, target=target)


def check_stencil(name: str, stencil: Tensor, images: Tensor) -> None:
    """Raise ValueError unless the stencil is square, of odd width, and reflect padding can serve it."""
    width = stencil.shape[0] if stencil.dim() == 2 else 0
    if width % 2 == 0 or stencil.shape[1] != width:
        raise ValueError(f"{name}: expected a square of odd width, got shape {tuple(stencil.shape)}")
    if width // 2 >= min(images.shape[-2:]):
        raise ValueError(
            f"{name}: expected at most {2 * min(images.shape[-2:]) - 1} taps wide for images of "
            f"{images.shape[-2]} x {images.shape[-1]} pixels, got {width}"
        )


def check_target(target: Any, images: Tensor) -> None:
    """Raise TypeError or ValueError unless the target is a map of the images' pixels."""
    check_tensor("target", target, floating=True)
    if target.shape != images.shape[-2:]:
        raise ValueError(f"target: expected the images' size {tuple(images.shape[-2:])}, got {tuple(target.shape)}")


@torch.library.custom_op("loco_ext::landscape", mutates_args=())
def _landscape(
    g: Tensor, weights: Tensor, stencil: Tensor, target: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _backend(g).landscape(g, weights, stencil, target)


@torch.library.custom_op("loco_ext::landscape_backward", mutates_args=())
def _landscape_backward(g: Tensor, weights: Tensor, slope: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _backend(g).landscape_backward(g, weights, slope, grad)


def _backend(g: Tensor) -> Any:
    """Return the module that has the family's implementations for the device of g."""
    triton = backends.choose(_FAMILY, g.device) == "triton"
    return importlib.import_module("loco_ext.triton_kernels.landscape") if triton else _reference


@_landscape.register_fake
def _(g: Tensor, weights: Tensor, stencil: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    backends.check_one_device(g=g, weights=weights, stencil=stencil, target=target)
    dtype = compute_dtype(g.dtype)
    image = g.new_empty(g.shape[2:], dtype=dtype)
    return g.new_empty((), dtype=dtype), image, torch.empty_like(image), g.new_empty(g.shape[1:], dtype=torch.float64)


@_landscape_backward.register_fake
def _(g: Tensor, weights: Tensor, slope: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return g.new_empty(g.shape), torch.empty_like(weights)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    g, weights, _stencil, _target = inputs
    _loss, image, laplacian, slope = output
    ctx.mark_non_differentiable(image, laplacian, slope)
    ctx.save_for_backward(g, weights, slope)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, Tensor, None, None]:
    g, weights, slope = ctx.saved_tensors
    u, by_weights = torch.ops.loco_ext.landscape_backward(g, weights, slope, grad)
    return u, by_weights, None, None


_landscape.register_autograd(_backward, setup_context=_setup_context)
