"""Layer normalisation over channels of which many are constant everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary


def layer_norm_with_constants(x: Tensor, constants: int, mean: float, variance: float, eps: float) -> Tensor:
    """Return features from which a linear layer can compute the result of a layer normalisation over more channels.

    The normalisation is over the k channels of ``x`` and ``constants`` others, C in all, which have the same values b
    everywhere. With the mean M of all channels and r = 1 / sqrt(variance of all channels + eps)::

        result = [(x - mean(x)) r, (mean(x) - mean(b)) r, r]
        (x - M) r = result[:k] + constants / C result[k]
        (b - M) r = (b - mean(b)) result[k + 1] - k / C result[k]

    The last feature, r, is omitted if all constants are equal. 16-bit numbers are summed in float32. torch.fx sees one
    call.

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
        result: Any = handle_torch_function(layer_norm_with_constants, (x,), x, constants, mean, variance, eps)
        return result
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
