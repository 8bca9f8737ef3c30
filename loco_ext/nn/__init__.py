"""Layers between convolution and full connection."""

from loco_ext.nn.deviations import Deviation, deviation
from loco_ext.nn.efcn import to_efcn
from loco_ext.nn.locally_connected import LocallyConnected1d, LocallyConnected2d, LocallyConnected3d

__all__ = ["Deviation", "LocallyConnected1d", "LocallyConnected2d", "LocallyConnected3d", "deviation", "to_efcn"]
