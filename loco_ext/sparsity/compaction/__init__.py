"""Conversion of a network with zeros in its weights to a smaller one with the same outputs."""

from loco_ext.sparsity.compaction.compact import compact
from loco_ext.sparsity.compaction.compaction_report import LayerReport, Report

__all__ = ["LayerReport", "Report", "compact"]
