"""The loss on a classifier's importance landscape and its gradient in the parameters, chunk by chunk.

With ``A = sum of w_m g_m^2`` over samples, the loss L depends on the parameters through the input gradients g and,
in the exact expectation, through the probabilities in the weights w. With ``u = dL/dg`` and ``c = dL/dw`` constant, its
gradient is that of ``<g, u> + <w, c>``. A landscape needs the gradients of all samples before the first u: all chunks
but the last are computed a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from loco_ext import ops
from loco_ext.regularizers.evaluation import check_logits, constant
from loco_ext.regularizers.routes import Gradients, Route


def landscape_gradient(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    x: Tensor,
    *,
    stencil: Tensor,
    target: Tensor | None,
    factor: float,
    exact: bool,
    uniform: Tensor,
    chunk_size: int | None,
    route: Route,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss and its gradient in each parameter, None where it is zero.

    Args:
        factor: multiplies the loss.
        exact: whether all classes count, each by its probability; else one is drawn for each image by ``uniform``.
        uniform: ``(N,)``, numbers in [0, 1).
        route: computes input gradients and what they pull back to the parameters.
    """
    x = constant(x)
    restart = _restart_rng(x.device)
    chunks = x.split(chunk_size or len(x))
    draws = uniform.split(chunk_size or len(x))
    count = 1
    if exact:
        restart()
        with torch.no_grad():
            logits = model(x[:1].clone())  # the model may write to its input
        check_logits(logits, x[:1])
        count = logits.shape[1]
    pieces = [
        (chunk, k if exact else None, draw) for chunk, draw in zip(chunks, draws, strict=True) for k in range(count)
    ]
    founds = []
    for piece in pieces:
        restart()
        found, pull = route(model, parameters, *piece)
        founds.append(found)
    g = torch.cat([found.g for found in founds]).requires_grad_()
    weights = torch.cat([found.probabilities if exact else torch.ones_like(found.probabilities) for found in founds])
    weights = (weights / len(x)).requires_grad_()
    loss = ops.landscape(g, weights, stencil, target).loss * factor
    u, c = (part.split([len(found.g) for found in founds]) for part in torch.autograd.grad(loss, (g, weights)))
    total: list[Tensor | None] = [None] * len(parameters)
    _add(total, pull(u[-1]))
    del pull
    for (chunk, _k, draw), found, direction in zip(pieces[:-1], founds, u, strict=False):
        restart()
        _, pull = route(model, parameters, chunk, found.classes, draw)
        _add(total, pull(direction))
        del pull
    if exact:
        for i, chunk in enumerate(chunks):
            restart()
            by_class = torch.stack(c[i * count : (i + 1) * count], 1)  # [N, classes]
            probable = (model(chunk.clone()).double().softmax(1) * by_class).sum() / len(x)
            _add(total, torch.autograd.grad(probable, parameters, allow_unused=True))
    return loss.detach(), total


def _add(total: list[Tensor | None], gradients: Gradients) -> None:
    """Add gradients to ``total`` in place; None is zero."""
    for i, gradient in enumerate(gradients):
        if gradient is not None:
            part = total[i]
            total[i] = gradient.detach() if part is None else part.add_(gradient)


def _restart_rng(device: torch.device) -> Callable[[], None]:
    """Return a function that puts the RNG back, so that a model that draws numbers draws the same ones each time."""
    state = torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restart() -> None:
        torch.set_rng_state(state)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)

    return restart
