"""Importance landscapes of networks, their total variation, and the smoothness of data that they are compared with."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from loco_ext import compiler, ops
from loco_ext.argument_checks import check_choice, check_count, check_module, check_seed, check_tensor, is_int
from loco_ext.fx.modules import unwrapped
from loco_ext.ops.landscape import check_stencil, laplacian_stencil
from loco_ext.reference.dtypes import compute_dtype
from loco_ext.reference.landscape import laplacian
from loco_ext.regularizers.evaluation import check_logits, measuring
from loco_ext.regularizers.input_gradients import EXPECTATIONS, batches_of, input_gradients

Images = Tensor | Iterable[Tensor | tuple[Tensor, ...]]


@compiler.disable
def importance_landscape(
    model: nn.Module, x: Images, *, expectation: str = "sampled", chunk_size: int | None = None, seed: int = 0
) -> Tensor:
    """Return the importance landscape of a classifier: how strongly its outputs react to each pixel, on average.

    The model runs in evaluation mode without autocast; its flags, its running statistics and the RNG are left as they
    were. The landscape is not differentiable; :class:`PILCRO` flattens it.

    Args:
        model: returns logits of shape ``(batch, classes)``.
        x: images ``(N, C, H, W)``, floating-point, on the model's device; or an iterable of batches, which are such
            tensors or begin with one, as those of a DataLoader do.
        expectation: ``"sampled"`` uses the gradient of one logit for each image, drawn by the model's probabilities;
            ``"exact"`` uses the gradients of all logits, weighted by these probabilities.
        chunk_size: maximum number of images to compute at once; None for a whole batch.
        seed: seed of the classes that are drawn.

    Returns:
        ``(H, W)``, with a mean square of 1, or all zeros if all gradients are; float64 for float64 images, else
        float32.

    Raises:
        TypeError: ``model`` is not a module, ``seed`` no int, or images are not floating-point tensors.
        ValueError: images are not of shape ``(N, C, H, W)`` or differ in size, or the outputs are not logits or not
            differentiable.
        RuntimeError: by torch, for activation checkpoints with ``use_reentrant=True``.

    Source:
        "PILCRO: Making Importance Landscapes Flat Again", section 3.3, eq. 6.

    Example:
        >>> import torch
        >>> from loco_ext import regularizers
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 6 * 6, 10))
        >>> image = regularizers.importance_landscape(model, torch.rand(4, 3, 8, 8))
        >>> image.shape, round(image.square().mean().item(), 4)
        (torch.Size([8, 8]), 1.0)
    """
    check_module("model", model)
    check_choice("expectation", expectation, EXPECTATIONS)
    if chunk_size is not None:
        check_count("chunk_size", chunk_size, smallest=1)
    generator = torch.Generator().manual_seed(check_seed(seed))
    model = unwrapped(model)
    squares = dtype = None
    for chunk in batches_of(x, chunk_size):
        uniform = torch.rand(len(chunk), generator=generator, dtype=torch.float64, device="cpu").to(chunk.device)
        with measuring(model, chunk.device):
            found = _squares(model, chunk, expectation, uniform)
        if squares is not None and found.shape != squares.shape:
            raise ValueError(f"x: expected images of one shape {tuple(squares.shape)}, got {tuple(found.shape)}")
        squares = found if squares is None else squares + found
        dtype = compute_dtype(chunk.dtype)
    if squares is None:
        raise ValueError("x: expected at least one batch, got none")
    root = squares.sqrt()[None]  # one sample whose squared gradient is the sum of all
    return ops.landscape(root, stencil=root.new_ones(1, 1)).map.to(dtype)


def _squares(model: nn.Module, x: Tensor, expectation: str, uniform: Tensor) -> Tensor:
    """Return the sum over images of squared gradients, ``(C, H, W)`` in float64."""
    if expectation == "sampled":
        return input_gradients(model, x, None, uniform).g.double().square().sum(0)
    with torch.no_grad():
        logits = model(x.clone())  # the model may write to its input
    check_logits(logits, x)
    total = x.new_zeros(x.shape[1:], dtype=torch.float64)
    for k in range(logits.shape[1]):
        found = input_gradients(model, x, k)
        total += torch.einsum("n,nchw->chw", found.probabilities, found.g.double().square())
    return total


@torch.no_grad()
def data_smoothness(x: Images, *, laplacian_kernel: int | Tensor = 3) -> Tensor:
    """Return how much images vary at each pixel, on average: the target of ``PILCRO(mode="target")``.

    The Laplacian of each image is normalised to a mean square of 1 over its pixels, then averaged over images. An image
    without variation counts as zeros.

    Args:
        x: as for :func:`importance_landscape`, but on any device.
        laplacian_kernel: odd width of the Laplacian, or a stencil, ``(k, k)``.

    Returns:
        ``(H, W)``; float64 for float64 images, else float32.

    Raises:
        TypeError, ValueError: images as for :func:`importance_landscape`, or a Laplacian that does not fit them.

    Source:
        "PILCRO: Making Importance Landscapes Flat Again", section 3.3.2.

    Example:
        >>> import torch
        >>> from loco_ext import regularizers
        >>> regularizers.data_smoothness(torch.rand(16, 3, 8, 8)).shape
        torch.Size([8, 8])
    """
    stencil = make_stencil(laplacian_kernel)
    total = dtype = None
    count = 0
    for images in batches_of(x, 1024):
        check_stencil("laplacian_kernel", stencil, images)
        norms = torch.linalg.vector_norm(laplacian(images.double(), stencil.to(images.device)), dim=1)  # [N, H, W]
        whole = torch.linalg.vector_norm(norms, dim=(1, 2), keepdim=True)
        maps = norms * (norms.shape[1:].numel() ** 0.5 / torch.where(whole == 0, 1.0, whole))
        if total is not None and maps.shape[1:] != total.shape:
            raise ValueError(f"x: expected images of one size {tuple(total.shape)}, got {tuple(maps.shape[1:])}")
        total = maps.sum(0) if total is None else total + maps.sum(0)
        count += len(images)
        dtype = compute_dtype(images.dtype)
    if total is None:
        raise ValueError("x: expected at least one batch, got none")
    return (total / count).to(dtype)


def make_stencil(laplacian_kernel: int | Tensor) -> Tensor:
    """Return the stencil of the Laplacian of an odd width, or the given one, in float64."""
    if isinstance(laplacian_kernel, Tensor):
        check_tensor("laplacian_kernel", laplacian_kernel, floating=True)
        return laplacian_kernel.detach().double()
    if not is_int(laplacian_kernel):
        raise TypeError(f"laplacian_kernel: expected an int or a tensor, got {laplacian_kernel!r}")
    if laplacian_kernel < 1 or laplacian_kernel % 2 == 0:
        raise ValueError(f"laplacian_kernel: expected an odd number of at least 1, got {laplacian_kernel}")
    return laplacian_stencil(int(laplacian_kernel))


def total_variation(image: Tensor) -> Tensor:
    """Return the mean squared difference of neighbouring pixels, over horizontal and vertical pairs alike.

    Args:
        image: ``(H, W)``, floating-point, with at least two pixels.

    Returns:
        A scalar, differentiable; float64 for a float64 image, else float32.

    Raises:
        TypeError: not a floating-point tensor.
        ValueError: another shape.

    Source:
        "PILCRO: Making Importance Landscapes Flat Again", section 4.1.1.

    Example:
        >>> import torch
        >>> from loco_ext import regularizers
        >>> regularizers.total_variation(torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
        tensor(0.5000)
    """
    check_tensor("image", image, floating=True)
    if image.dim() != 2 or image.numel() < 2:
        raise ValueError(f"image: expected shape (H, W) with at least two pixels, got {tuple(image.shape)}")
    image = image.to(compute_dtype(image.dtype))
    return torch.cat([image.diff(dim=0).flatten(), image.diff(dim=1).flatten()]).square().mean()
