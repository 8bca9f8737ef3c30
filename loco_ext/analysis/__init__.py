"""Measure networks: locality and the decay it suggests, cohesion of maps, the loss near a model, and robustness."""

from loco_ext.analysis.cohesion import cohesion, localize
from loco_ext.analysis.corruptions import CORRUPTIONS, corrupt
from loco_ext.analysis.interpolation import interpolate
from loco_ext.analysis.landscape import TopEigenvalue, gradient_norm, top_hessian_eigenvalue
from loco_ext.analysis.locality import Cell, LocalityStatistics, estimate_locality, locality_statistics
from loco_ext.analysis.masking import only_blocks

__all__ = [
    "CORRUPTIONS",
    "Cell",
    "LocalityStatistics",
    "TopEigenvalue",
    "cohesion",
    "corrupt",
    "estimate_locality",
    "gradient_norm",
    "interpolate",
    "locality_statistics",
    "localize",
    "only_blocks",
    "top_hessian_eigenvalue",
]
