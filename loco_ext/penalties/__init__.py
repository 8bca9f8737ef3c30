"""Penalties on rings and filters of weights, for the optimizers of :mod:`loco_ext.optim` and as terms of a loss.

:mod:`loco_ext.sparsity` exposes them. On its way to the kernels, a penalty takes two forms. The user's object
(``group``, ``folded``) holds settings. Its ``for_step(weight)`` combines them with the weight's filters and nested
groups (``filters``) to the argument of the step's operator: a :class:`loco_ext.ops.StepPenalty` of numbers, or a
:class:`loco_ext.ops.LayerPenalty` with a function that shrinks the weight after the step.
"""

from loco_ext.penalties.base import Penalty
from loco_ext.penalties.folded import FoldedPenalty
from loco_ext.penalties.group import GroupPenalty, KernelPenalty, RingPenalty
from loco_ext.penalties.kkt import kkt_residual
from loco_ext.penalties.rings import kernel_sizes, ring_norms, ring_prox
from loco_ext.penalties.strengths import dual_norm, max_strength

__all__ = [
    "FoldedPenalty",
    "GroupPenalty",
    "KernelPenalty",
    "Penalty",
    "RingPenalty",
    "dual_norm",
    "kernel_sizes",
    "kkt_residual",
    "max_strength",
    "ring_norms",
    "ring_prox",
]
