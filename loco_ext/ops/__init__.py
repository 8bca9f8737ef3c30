"""The operators, one file per family: argument checks, the choice of a backend, and their registration with torch."""

from loco_ext.ops.backends import backend
from loco_ext.ops.block_sparse import Consume, block_sparse_matmul
from loco_ext.ops.landscape import Landscape, landscape
from loco_ext.ops.mixed_conv import mixed_conv2d
from loco_ext.ops.optim_step import optim_step_adam, optim_step_sgd
from loco_ext.ops.penalties import LayerPenalty, StepPenalty
from loco_ext.ops.ring_prox import ring_norms, ring_prox

__all__ = [
    "Consume",
    "Landscape",
    "LayerPenalty",
    "StepPenalty",
    "backend",
    "block_sparse_matmul",
    "landscape",
    "mixed_conv2d",
    "optim_step_adam",
    "optim_step_sgd",
    "ring_norms",
    "ring_prox",
]
