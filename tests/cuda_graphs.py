"""Capturing steps of optimizers in CUDA graphs."""

import torch
from stepping import params_of, set_gradients


def capture(*optimizers):
    """A graph of one step of each; nothing has happened before it is replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for optimizer in optimizers:
            optimizer.step()
    return graph


def gradients_of(optimizer):
    return [p.grad for p in params_of(optimizer)]


def refill(gradients, reference, seed):
    """New gradients in the memory given, the same for the reference."""
    set_gradients(params_of(reference), seed)
    for grad, q in zip(gradients, params_of(reference), strict=True):
        grad.copy_(q.grad)
