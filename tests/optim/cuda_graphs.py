"""Helpers that capture optimizer steps in CUDA graphs."""

import torch

from tests.optim.stepping import params_of, set_gradients


def capture(*optimizers):
    """Return a graph of one step of each optimizer; nothing is stepped before it is replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for optimizer in optimizers:
            optimizer.step()
    return graph


def gradients_of(optimizer):
    return [p.grad for p in params_of(optimizer)]


def refill(gradients, reference, seed):
    """Write new gradients into the given memory, and set the same on the reference's parameters."""
    set_gradients(params_of(reference), seed)
    for grad, q in zip(gradients, params_of(reference), strict=True):
        grad.copy_(q.grad)
