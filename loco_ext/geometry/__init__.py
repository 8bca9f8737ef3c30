"""Geometry of convolution kernels' taps, and of the pixel pairs of layers between convolution and full connection.

Distances, decay maps and rings of taps; patterns of blocks and their distances. Weights are not involved.
"""

from loco_ext.geometry.block_distances import block_decay_map, block_distance_classes, block_offsets, block_rings
from loco_ext.geometry.block_pattern import BlockPattern, ConvTaps, Transposed
from loco_ext.geometry.conv import ConvGeometry, values_bytes
from loco_ext.geometry.taps import decay_map, distance_classes, ring_index, ring_list, tap_distances

__all__ = [
    "BlockPattern",
    "ConvGeometry",
    "ConvTaps",
    "Transposed",
    "block_decay_map",
    "block_distance_classes",
    "block_offsets",
    "block_rings",
    "decay_map",
    "distance_classes",
    "ring_index",
    "ring_list",
    "tap_distances",
    "values_bytes",
]
