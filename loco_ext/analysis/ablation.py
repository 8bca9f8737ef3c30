"""Ablation of the pixels that matter most to a prediction, found by Integrated Gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from loco_ext import compiler
from loco_ext.analysis.target_logits import check_classifier, gradients_of_targets, of_targets
from loco_ext.argument_checks import check_count, is_int
from loco_ext.fx.modules import unwrapped
from loco_ext.reference.dtypes import compute_dtype
from loco_ext.regularizers.evaluation import check_images, constant, measuring


@compiler.disable
def integrated_gradients(model: nn.Module, x: Tensor, targets: Tensor, baselines: Tensor, steps: int = 32) -> Tensor:
    """Return each input's contribution to the target's logit: gradients integrated from baselines to the images.

    They are ``(x - b) * mean_k dh_target/dx(b + a_k (x - b))`` at the midpoints ``a_k = (k + 1/2) / steps`` of equal
    parts of the path. With several baselines, point k is on the path from baseline ``k mod B``, which gives the mean
    over baselines at the price of one. With one baseline the contributions add up to the difference of the logits, up
    to the error of the sum.

    Args:
        model: maps images to logits [N, classes]; it is evaluated in evaluation mode, and its flags are restored.
        x: floating-point images of shape ``(N, C, H, W)``.
        targets: int64 classes of shape ``(N,)``.
        baselines: images of shape ``(B, C, H, W)``, in the dtype of ``x``.
        steps: number of gradients for each image, at least B.

    Returns:
        Tensor of the shape of ``x``.

    Raises:
        TypeError: ``model`` is not a module, ``x`` or ``baselines`` is not a floating-point tensor, or ``targets`` is
            not an int64 tensor.
        ValueError: shapes do not fit, the model does not return one row of logits per image, a target is none of its
            classes, its output cannot be differentiated, or there are fewer steps than baselines.
        RuntimeError: by torch, for activation checkpoints with ``use_reentrant=True``.

    Source:
        Sundararajan, Taly, Yan, "Axiomatic Attribution for Deep Networks" (2017), section 3; several baselines as in
        Moens, Yu, Salimi-Khorshidi, "PILCRO: Making Importance Landscapes Flat Again", section 4.1.2.

    Example:
        >>> import torch
        >>> from loco_ext import analysis
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> x, targets = torch.ones(1, 1, 2, 2), torch.tensor([1])
        >>> found = analysis.integrated_gradients(model, x, targets, torch.zeros_like(x))
        >>> torch.allclose(found.flatten(), model[1].weight[1])
        True
    """
    check_classifier(model, x, targets)
    check_images("baselines", baselines)
    if baselines.shape[1:] != x.shape[1:]:
        raise ValueError(f"baselines: expected images of the shape {tuple(x.shape[1:])}, got {tuple(baselines.shape)}")
    if check_count("steps", steps, smallest=1) < len(baselines):
        raise ValueError(f"steps: expected at least one for each of {len(baselines)} baselines, got {steps}")
    model = unwrapped(model)
    with measuring(model, x.device):
        x, baselines, targets = constant(x), constant(baselines), constant(targets)
        total = torch.zeros_like(x, dtype=compute_dtype(x.dtype))
        for step in range(steps):
            way = x.to(total.dtype) - baselines[step % len(baselines)]
            point = (x - (1 - (step + 0.5) / steps) * way).to(x.dtype)
            total += gradients_of_targets(model, point, targets) * way
        return (total / steps).to(x.dtype)


@compiler.disable
def ablation_curve(model: nn.Module, x: Tensor, targets: Tensor, relevance: Tensor, counts: Sequence[int]) -> Tensor:
    """Return what share of the target's probability remains without an image's most relevant pixels.

    The pixels with the largest sums of ``relevance`` over channels are replaced by their channel's mean over the image.

    Args:
        model, x, targets: as for :func:`integrated_gradients`.
        relevance: tensor of the shape of ``x``, such as :func:`integrated_gradients` returns.
        counts: numbers of pixels to replace, each from 0 to ``H * W``.

    Returns:
        Tensor of shape ``(len(counts), N)``: the target's probability over that of the whole image.

    Raises:
        TypeError, ValueError: as :func:`integrated_gradients`; ``relevance`` has another shape than ``x``, or a count
            is out of range.

    Source:
        Moens, Yu, Salimi-Khorshidi, "PILCRO: Making Importance Landscapes Flat Again", section 4.1.2 and figure 6.

    Example:
        >>> import torch
        >>> from loco_ext import analysis
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> x, targets = torch.rand(3, 1, 2, 2), torch.tensor([0, 1, 1])
        >>> relevance = analysis.integrated_gradients(model, x, targets, torch.zeros(1, 1, 2, 2))
        >>> analysis.ablation_curve(model, x, targets, relevance, (0, 2, 4)).shape
        torch.Size([3, 3])
    """
    check_classifier(model, x, targets)
    if not isinstance(relevance, Tensor) or relevance.shape != x.shape:
        found = tuple(relevance.shape) if isinstance(relevance, Tensor) else type(relevance).__name__
        raise ValueError(f"relevance: expected the shape of x, {tuple(x.shape)}, got {found}")
    pixels = x.shape[2] * x.shape[3]
    if not all(is_int(count) and 0 <= count <= pixels for count in counts):
        raise ValueError(f"counts: expected ints from 0 to {pixels}, got {tuple(counts)}")
    order = relevance.sum(1, dtype=torch.float64).flatten(1).argsort(dim=1, descending=True, stable=True)
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(pixels, device=x.device).expand_as(order))
    ranks = ranks.view(len(x), 1, *x.shape[2:])
    means, model = x.mean((2, 3), keepdim=True), unwrapped(model)
    with measuring(model, x.device), torch.no_grad():
        left = [_log_probabilities(model, torch.where(ranks < count, means, x), targets) for count in (0, *counts)]
    return torch.stack([(some - left[0]).exp().to(x.dtype) for some in left[1:]]) if counts else x.new_zeros(0, len(x))


def _log_probabilities(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Return the logarithm of the probability of each image's target, float64 (N,): the probability may underflow."""
    logits = model(x)
    return of_targets(logits, x, targets).double() - logits.double().logsumexp(1)
