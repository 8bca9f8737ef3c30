"""Structured sparsity: penalties on nested rings of a kernel, their exact prox, and compaction of the result."""

from typing import Any

from loco_ext.penalties import (
    FoldedPenalty,
    KernelPenalty,
    Penalty,
    RingPenalty,
    dual_norm,
    kernel_sizes,
    kkt_residual,
    max_strength,
    ring_norms,
    ring_prox,
)
from loco_ext.sparsity.budget.controller import Budget
from loco_ext.sparsity.budget.distillation import distillation_loss
from loco_ext.sparsity.budget.shrink import shrink_to
from loco_ext.sparsity.compaction import LayerReport, Report, compact
from loco_ext.sparsity.complexity import ComplexityPenalty, complexity_penalties
from loco_ext.sparsity.export import export_onnx
from loco_ext.sparsity.files import load, save
from loco_ext.sparsity.folded_norms import folded_penalties, zero_dead_filters
from loco_ext.sparsity.former_names import present_name
from loco_ext.sparsity.frontier import Frontier, FrontierPoint, frontier
from loco_ext.sparsity.vocabulary import ModelFileError

__all__ = [
    "Budget",
    "ComplexityPenalty",
    "FoldedPenalty",
    "Frontier",
    "FrontierPoint",
    "KernelPenalty",
    "LayerReport",
    "ModelFileError",
    "Penalty",
    "Report",
    "RingPenalty",
    "compact",
    "complexity_penalties",
    "distillation_loss",
    "dual_norm",
    "export_onnx",
    "folded_penalties",
    "frontier",
    "kernel_sizes",
    "kkt_residual",
    "load",
    "max_strength",
    "ring_norms",
    "ring_prox",
    "save",
    "shrink_to",
    "zero_dead_filters",
]


def __getattr__(name: str) -> Any:
    if name != "zero_dead_kernels":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[present_name(name)]
