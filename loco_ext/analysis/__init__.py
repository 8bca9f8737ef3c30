"""Measuring locality: statistics of trained weights, the decay they call for, and the cohesion of feature maps."""

from loco_ext.analysis.cohesion import cohesion, localize
from loco_ext.analysis.locality import Cell, LocalityStatistics, estimate_locality, locality_statistics

__all__ = ["Cell", "LocalityStatistics", "cohesion", "estimate_locality", "locality_statistics", "localize"]
