"""Selection and normalisation of channels, as compacted networks need them; torch.fx records one call of each."""

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from loco_ext.ops.memory_format import is_channels_last


def take_channels(x: Tensor, index: Tensor, axis: int = 1) -> Tensor:
    """Return ``x.index_select(axis, index)`` in the memory format of ``x``; fast in every format.

    If the channels of a pixel are contiguous, pixels are rows of a matrix and channels its columns. torch selects
    columns several times faster than strided planes, and the result keeps its memory format.

    Args:
        x: ``(N, C, *)``, of any dtype.
        index: int64, ``(channels of the result,)``.
        axis: axis of the channels.

    Raises:
        IndexError, RuntimeError: an index is out of range.

    Example:
        >>> import torch
        >>> x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
        >>> y = take_channels(x, torch.tensor([2, 0]))
        >>> torch.equal(y, x[:, [2, 0]]), y.is_contiguous(memory_format=torch.channels_last)
        (True, True)
    """
    if has_torch_function_unary(x):
        return handle_torch_function(take_channels, (x,), x, index, axis)
    pixels = x.movedim(axis, -1)
    if (x.is_contiguous() and not is_channels_last(x)) or not pixels.is_contiguous():
        return x.index_select(axis, index)
    return pixels.flatten(0, -2).index_select(1, index).unflatten(0, pixels.shape[:-1]).movedim(-1, axis)


def layer_norm_with_constants(x: Tensor, constants: int, mean: float, variance: float, eps: float) -> Tensor:
    """Return features from which a linear layer can compute the result of a layer normalisation over more channels.

    The normalisation is over the k channels of ``x`` and ``constants`` others, C in all, which have the same values b
    everywhere. With the mean M of all channels and r = 1 / sqrt(variance of all channels + eps)::

        result = [(x - mean(x)) r, (mean(x) - mean(b)) r, r]
        (x - M) r = result[:k] + constants / C result[k]
        (b - M) r = (b - mean(b)) result[k + 1] - k / C result[k]

    The last feature, r, is omitted if all constants are equal. 16-bit numbers are summed in float32.

    Args:
        x: ``(*, k)``, of a floating dtype.
        constants: number of constant channels, 1 or more.
        mean, variance: of the constants; the variance is a mean of squares.
        eps: of the normalisation.

    Example:
        >>> import torch
        >>> from torch.nn.functional import layer_norm
        >>> x = torch.randn(2, 3).double()
        >>> y = layer_norm_with_constants(x, 2, 0.5, 0.0, 1e-5)
        >>> whole = layer_norm(torch.cat([x, torch.full_like(x[:, :2], 0.5)], 1), (5,))
        >>> torch.allclose(y[:, :3] + 2 / 5 * y[:, 3:], whole[:, :3]), torch.allclose(-3 / 5 * y[:, 3:], whole[:, 3:])
        (True, True)
    """
    if has_torch_function_unary(x):
        return handle_torch_function(layer_norm_with_constants, (x,), x, constants, mean, variance, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    share = constants / (x.shape[-1] + constants)
    centre = wide.mean(-1, keepdim=True)
    deviations, offset = wide - centre, centre - mean
    # Only squares are summed, so nothing cancels.
    within = deviations.square().mean(-1, keepdim=True) * (1 - share) + share * variance
    factor = (within + share * (1 - share) * offset.square() + eps).rsqrt()
    features = [deviations * factor, offset * factor, *([factor] if variance else [])]
    return torch.cat(features, -1).to(x.dtype)


def features_beside(variance: float) -> int:
    """Return how many features :func:`layer_norm_with_constants` returns besides one for each channel."""
    return 2 if variance else 1
