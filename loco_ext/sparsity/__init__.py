"""Structured sparsity: penalties on nested rings of a kernel, their exact prox, and what they leave."""

from loco_ext.sparsity.compaction import LayerReport, Report, compact
from loco_ext.sparsity.kkt import kkt_residual
from loco_ext.sparsity.penalties import KernelPenalty, Penalty, RingPenalty
from loco_ext.sparsity.prox import kernel_sizes, ring_norms, ring_prox

__all__ = [
    "KernelPenalty",
    "LayerReport",
    "Penalty",
    "Report",
    "RingPenalty",
    "compact",
    "kernel_sizes",
    "kkt_residual",
    "ring_norms",
    "ring_prox",
]
