"""Structured sparsity: penalties on nested rings of a kernel, their exact prox, and what they leave."""

from loco_ext.sparsity.complexity import complexity_penalties
from loco_ext.sparsity.kkt import kkt_residual
from loco_ext.sparsity.penalties import FoldedPenalty, KernelPenalty, Penalty, RingPenalty
from loco_ext.sparsity.prox import kernel_sizes, ring_norms, ring_prox
from loco_ext.sparsity.tracing import folded_penalties

__all__ = [
    "FoldedPenalty",
    "KernelPenalty",
    "Penalty",
    "RingPenalty",
    "complexity_penalties",
    "folded_penalties",
    "kernel_sizes",
    "kkt_residual",
    "ring_norms",
    "ring_prox",
]
