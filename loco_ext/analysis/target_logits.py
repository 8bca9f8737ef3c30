"""A classifier's logits of given classes."""

from typing import Any

import torch
from torch import Tensor, nn

from loco_ext.argument_checks import check_module
from loco_ext.regularizers.evaluation import check_images, check_logits, constant


def check_classifier(model: nn.Module, x: Tensor, targets: Any) -> None:
    """Raise TypeError or ValueError unless these are a module, images (N, C, H, W) and int64 classes (N,)."""
    check_module("model", model)
    check_images("x", x)
    check_int64("targets", targets)
    if targets.shape != x.shape[:1]:
        raise ValueError(f"targets: expected shape {tuple(x.shape[:1])}, got {tuple(targets.shape)}")


def check_int64(name: str, value: Any) -> None:
    """Raise TypeError unless the value is an int64 tensor."""
    if not isinstance(value, Tensor) or value.dtype != torch.int64:
        found = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: expected an int64 tensor, got {found}")


def of_targets(values: Tensor, x: Tensor, targets: Tensor) -> Tensor:
    """Return the value of each image at its target, (N,), from a model's output or what was made of it."""
    check_logits(values, x)
    classes = values.shape[1]
    if not ((targets >= 0) & (targets < classes)).all():
        raise ValueError(f"targets: expected classes from 0 to {classes - 1}, got others")
    return values.gather(1, targets[:, None])[:, 0]


def gradients_of_targets(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of each image's logit at its target in the image, (N, C, H, W)."""
    images = constant(x).requires_grad_()
    logits = of_targets(model(images.clone()), x, targets)  # the model may write to its input
    if not logits.requires_grad:
        raise ValueError("model: expected an output that can be differentiated, got one without a gradient")
    (gradients,) = torch.autograd.grad(logits.sum(), images, materialize_grads=True)
    return gradients
