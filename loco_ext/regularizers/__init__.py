"""Regularisers of how networks depend on their inputs, and the measurements that belong to them."""

from loco_ext.regularizers.landscape import data_smoothness, importance_landscape, total_variation
from loco_ext.regularizers.path_counts import path_counts
from loco_ext.regularizers.pilcro import PILCRO

__all__ = ["PILCRO", "data_smoothness", "importance_landscape", "path_counts", "total_variation"]
