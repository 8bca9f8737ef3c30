"""Measure networks: locality and the decay it suggests, cohesion of maps, the loss near a model, and robustness."""

from loco_ext.analysis.ablation import ablation_curve, integrated_gradients
from loco_ext.analysis.cohesion import cohesion, localize
from loco_ext.analysis.corruptions import CORRUPTIONS, corrupt
from loco_ext.analysis.curvature import TopEigenvalue, gradient_norm, top_hessian_eigenvalue
from loco_ext.analysis.interpolation import interpolate
from loco_ext.analysis.locality import Cell, LocalityStatistics, estimate_locality, locality_statistics
from loco_ext.analysis.masking import only_blocks
from loco_ext.analysis.permutation import gradient_importance, permutation_importance

__all__ = [
    "CORRUPTIONS",
    "Cell",
    "LocalityStatistics",
    "TopEigenvalue",
    "ablation_curve",
    "cohesion",
    "corrupt",
    "estimate_locality",
    "gradient_importance",
    "gradient_norm",
    "integrated_gradients",
    "interpolate",
    "locality_statistics",
    "localize",
    "only_blocks",
    "permutation_importance",
    "top_hessian_eigenvalue",
]
