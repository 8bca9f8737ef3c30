"""Routes to the gradient of <g, u> in a network's parameters, where g are gradients in its inputs and u is constant.

A route takes the model, its parameters, images and classes as :func:`~loco_ext.regularizers.input_gradients` does, and
returns the input gradients with a function that takes u to the gradient in each parameter, None where it is zero. The
function can be called once.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from loco_ext.regularizers.input_gradients import InputGradients, input_gradients

Gradients = Sequence[Tensor | None]
Pull = Callable[[Tensor], Gradients]
Route = Callable[
    [nn.Module, Sequence[nn.Parameter], Tensor, Tensor | float | None, Tensor | None], tuple[InputGradients, Pull]
]


def double_backward(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    x: Tensor,
    classes: Tensor | float | None,
    uniform: Tensor | None,
) -> tuple[InputGradients, Pull]:
    """Differentiate the backward pass itself: the reference, which every differentiable network supports."""
    found = input_gradients(model, x, classes, uniform, graph=True)

    return found._replace(g=found.g.detach()), lambda u: pull_back(found.g, parameters, u)


def pull_back(g: Tensor, parameters: Sequence[nn.Parameter], u: Tensor) -> Gradients:
    """Return the gradient of <g, u> in each parameter, None where it is zero."""
    if not g.requires_grad:
        return [None] * len(parameters)
    return torch.autograd.grad(g, parameters, u, allow_unused=True)
