"""Compaction of models without a graph: filters are cropped module by module, and all channels are kept."""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from loco_ext.fx.modules import count_owners, is_hooked
from loco_ext.sparsity.compaction.compaction_report import Report
from loco_ext.sparsity.compaction.convolution import Bucket, Convolution, standalone
from loco_ext.sparsity.compaction.describe import describe_layer
from loco_ext.sparsity.compaction.graph import copies, kind_of
from loco_ext.sparsity.compaction.macs import samples_in
from loco_ext.sparsity.compaction.rewrite import Choose
from loco_ext.sparsity.compaction.roles import CONVOLUTIONS


def crop_modules(model: nn.Module, inputs: Sequence[Any], choose: Choose, why: str) -> tuple[nn.Module, Report]:
    """Return a copy of the model with cropped filters, and the report, which says why nothing more was done."""
    result = copy.deepcopy(model)
    samples = samples_in([x.shape for x in inputs if isinstance(x, Tensor)])
    report = Report(notes={"model": f"all channels are kept: {why}"})
    for name, (read, written) in _calls(result, inputs).items():
        module: Any = result.get_submodule(name)
        weight = module.weight.detach()
        convolution = Convolution(module, weight, module.bias, module.in_channels, written["channels_last"])
        buckets = choose(convolution, read, False)
        images = Fraction(written["shape"][0], samples) if len(written["shape"]) == weight.dim() else 1
        pixels = images * Fraction(prod(written["shape"][2 - weight.dim() :]))
        report.layers.append(describe_layer(name, weight, pixels, weight, pixels, buckets))
        if [bucket.box for bucket in buckets] != [Bucket.whole(weight).box]:
            result.set_submodule(name, standalone(convolution, buckets))
    return result, report


def _calls(model: nn.Module, inputs: Sequence[Any]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the convolutions that may be replaced, by name, with the kinds of their inputs and outputs."""
    owned = count_owners(model)
    calls: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            if name and type(module) in CONVOLUTIONS and not is_hooked(module) and owned[id(module.weight)] == 1:

                def record(module: nn.Module, x: tuple[Tensor, ...], y: Tensor, name: str = name) -> None:
                    calls[name] = kind_of(x[0]), kind_of(y)

                hooks.enter_context(module.register_forward_hook(record))
        model(*copies(inputs))
    return calls
