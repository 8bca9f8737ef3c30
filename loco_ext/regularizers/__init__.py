"""Regularisers of what a network computes around its inputs, and their measurements."""

from loco_ext.regularizers.affine import NotPiecewiseLinearError
from loco_ext.regularizers.linear_regions import Unit, count_regions, region_radius
from loco_ext.regularizers.roll import ROLL, MarginLoss

__all__ = ["ROLL", "MarginLoss", "NotPiecewiseLinearError", "Unit", "count_regions", "region_radius"]
