"""Gradients of a network's outputs in its input images."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from loco_ext.regularizers.evaluation import check_images, check_logits, constant

# Ways to take the expectation over the predicted classes: one class is drawn for each image, or all classes are
# weighted by their probabilities.
EXPECTATIONS = ("sampled", "exact")


class InputGradients(NamedTuple):
    """Gradients of one output of each image.

    Attributes:
        g: ``(N, C, H, W)``: of the logit of the image's class, in the image.
        classes: int64, ``(N,)``.
        probabilities: ``(N,)``: the softmax of the logits at these classes, detached.
    """

    g: Tensor
    classes: Tensor
    probabilities: Tensor


def input_gradients(
    model: nn.Module, x: Tensor, classes: Tensor | float | None, uniform: Tensor | None = None, *, graph: bool = False
) -> InputGradients:
    """Return the gradients of one logit of each image in that image.

    Args:
        x: ``(N, C, H, W)``.
        classes: the class of each image, or one for all; None draws ``y ~ softmax(model(x))`` by ``uniform``.
        uniform: ``(N,)``, numbers in [0, 1).
        graph: whether the gradients can be differentiated.
    """
    x = constant(x).requires_grad_()
    logits = model(x.clone())  # the model may write to its input
    check_logits(logits, x)
    if not logits.requires_grad:
        raise ValueError("model: expected an output that can be differentiated, got one without a gradient")
    probabilities = logits.detach().double().softmax(1)
    if classes is None:
        classes = draw(probabilities, uniform)
    elif not isinstance(classes, Tensor):
        classes = torch.full((len(x),), int(classes), device=x.device)
    chosen = logits.gather(1, classes[:, None])
    (g,) = torch.autograd.grad(chosen.sum(), x, create_graph=graph, materialize_grads=True)
    return InputGradients(g, classes, probabilities.gather(1, classes[:, None])[:, 0])


def draw(probabilities: Tensor, uniform: Tensor | None) -> Tensor:
    """Return a class for each row of probabilities, ``(N, classes)``, by the inverse of its cumulative sum.

    torch.multinomial would stop the device at a NaN, which has to come through to the loss.
    """
    assert uniform is not None
    below = probabilities.cumsum(1) <= uniform[:, None]
    return below.sum(1).clamp(max=probabilities.shape[1] - 1)


def batches_of(x: Tensor | Iterable[Tensor | tuple[Tensor, ...]], chunk_size: int | None) -> Iterator[Tensor]:
    """Yield the images in chunks: those of a tensor, or of the batches of an iterable, such as a DataLoader.

    A batch is a tensor of images, or a tuple or list that begins with one.
    """
    if not isinstance(x, Iterable):
        raise TypeError(f"x: expected a tensor or an iterable of batches, got {type(x).__name__}")
    for i, batch in enumerate([x] if isinstance(x, Tensor) else x):
        images = batch[0] if isinstance(batch, tuple | list) and batch else batch
        check_images("x" if isinstance(x, Tensor) else f"x[{i}]", images)
        yield from images.split(chunk_size or len(images))
