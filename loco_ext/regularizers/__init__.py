"""Regularisers of what a network computes around its inputs, and the measurements that belong to them."""

from loco_ext.regularizers.affine import NotPiecewiseLinearError
from loco_ext.regularizers.landscape import data_smoothness, importance_landscape, total_variation
from loco_ext.regularizers.linear_regions import Unit, count_regions, region_radius
from loco_ext.regularizers.path_counts import path_counts
from loco_ext.regularizers.pilcro import PILCRO
from loco_ext.regularizers.roll import ROLL, MarginLoss

__all__ = [
    "PILCRO",
    "ROLL",
    "MarginLoss",
    "NotPiecewiseLinearError",
    "Unit",
    "count_regions",
    "data_smoothness",
    "importance_landscape",
    "path_counts",
    "region_radius",
    "total_variation",
]
