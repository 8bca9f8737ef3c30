"""Locality as something you can turn, for people who train convolutional networks."""

from loco_ext import geometry, nn, optim, sparsity
from loco_ext.ops import backend
from loco_ext.version import __version__

__all__ = ["__version__", "backend", "geometry", "nn", "optim", "sparsity"]
