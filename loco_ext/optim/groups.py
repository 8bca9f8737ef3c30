"""Splitting a model's parameters into groups by module type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter

from loco_ext.geometry.marks import mark_blocks, pattern_of
from loco_ext.nn.locally_connected import LocallyConnectedNd
from loco_ext.optim.locality import Factors
from loco_ext.sparsity import Penalty
from loco_ext.sparsity.tracing import is_convolution

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    locality: Factors | None = None,
    penalty: Penalty | Mapping[str, Penalty | None] | None = None,
    per_layer: Mapping[str, Factors | None] | None = None,
) -> list[dict[str, Any]]:
    """Groups for an optimizer: convolution weights, other decayed weights, and what is not decayed.

    Convolution weights (of Conv and ConvTranspose modules) get ``locality``, each layer named in ``per_layer`` its
    own entry instead; those of Conv modules, 1x1 convolutions included, get ``penalty``; all share one group. The
    blocks of locally connected layers are convolution weights, too: their decay depends on how far a block lies from
    the middle of its output pixel's receptive field (:func:`loco_ext.geometry.block_decay_map`), after growth
    and pruning as well. Biases, the parameters of normalisation layers and other vectors are not decayed. Everything
    else is decayed uniformly, position embeddings of whatever shape included. Shared parameters appear once, with their
    first owner; empty groups are left out.

    Args:
        model: its parameters may be frozen, so that they can be unfrozen later.
        weight_decay: of the first two groups, torch's convention (the paper's lambda times 2).
        locality: None, ``(gamma, eta)`` or one factor per distance class.
        penalty: None, or of every Conv module's weight, or module names to penalties, others having none (as from
            :func:`loco_ext.sparsity.folded_penalties`). The kernels of a ConvTranspose lie along another axis.
        per_layer: module name, as in ``model.named_modules()``, to such an entry.

    Raises:
        ValueError: if ``per_layer`` or ``penalty`` names no convolution of the model, or a lazy module has not run yet.

    Example:
        >>> from torch import nn
        >>> from loco_ext import optim
        >>> model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
        >>> groups = optim.parameter_groups(model, 5e-4, locality=(0.5, 2.0), per_layer={"0": (0.7, 1.3)})
        >>> [(len(group["params"]), group["weight_decay"], group["locality"]) for group in groups]
        [(1, 0.0005, [(0.7, 1.3)]), (1, 0.0005, None), (4, 0.0, None)]
    """
    per_layer = dict(per_layer or {})
    penalty_of = _penalty_of(model, penalty)
    convolutions: list[nn.Parameter] = []
    factors: list[Factors | None] = []
    penalties: list[Penalty | None] = []
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    unknown = set(per_layer)
    for module_name, module, name, parameter in _owned_parameters(model):
        if isinstance(module, _ConvNd | LocallyConnectedNd):
            unknown.discard(module_name)
        if isinstance(module, LocallyConnectedNd):
            mark_blocks(
                module.values, module.pattern
            )  # a parameter that came in its place is not, such as a sharded one
        if (isinstance(module, _ConvNd) and name == "weight") or pattern_of(parameter) is not None:
            convolutions.append(parameter)
            factors.append(per_layer.get(module_name, locality))
            penalties.append(penalty_of.get(module_name))
        elif isinstance(module, _NORMS) or parameter.dim() < 2 or "bias" in name:
            plain.append(parameter)
        else:
            decayed.append(parameter)
    if unknown:
        raise ValueError(f"per_layer: expected names of convolutions of the model, got {sorted(unknown)}")
    chosen = penalties if any(penalties) else None
    groups = [
        {"params": convolutions, "weight_decay": weight_decay, "locality": factors, "penalty": chosen},
        {"params": decayed, "weight_decay": weight_decay, "locality": None, "penalty": None},
        {"params": plain, "weight_decay": 0.0, "locality": None, "penalty": None},
    ]
    return [group for group in groups if group["params"]]


def _penalty_of(model: nn.Module, penalty: Penalty | Mapping[str, Penalty | None] | None) -> dict[str, Penalty | None]:
    """The penalty of each Conv module, by name."""
    modules = model.named_modules(remove_duplicate=False)
    names = [name for name, module in modules if is_convolution(module) or isinstance(module, LocallyConnectedNd)]
    if not isinstance(penalty, Mapping):
        return dict.fromkeys(names, penalty)
    if unknown := sorted(set(penalty) - set(names)):
        raise ValueError(f"penalty: expected names of Conv modules of the model, got {unknown}")
    return dict(penalty)


def _owned_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, UninitializedParameter):
                raise ValueError(
                    f"model: expected initialised parameters, {module_name}.{name} is lazy; run the model once"
                )
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield module_name, module, name, parameter
