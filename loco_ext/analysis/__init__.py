"""Measure locality and the loss: weight statistics, the decay they suggest, map cohesion, and the loss near a model."""

from loco_ext.analysis.cohesion import cohesion, localize
from loco_ext.analysis.interpolation import interpolate
from loco_ext.analysis.landscape import TopEigenvalue, gradient_norm, top_hessian_eigenvalue
from loco_ext.analysis.locality import Cell, LocalityStatistics, estimate_locality, locality_statistics
from loco_ext.analysis.masking import only_blocks

__all__ = [
    "Cell",
    "LocalityStatistics",
    "TopEigenvalue",
    "cohesion",
    "estimate_locality",
    "gradient_norm",
    "interpolate",
    "locality_statistics",
    "localize",
    "only_blocks",
    "top_hessian_eigenvalue",
]
