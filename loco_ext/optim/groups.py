"""Splitting a model's parameters into groups by module type."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter

from loco_ext.argument_checks import check_module
from loco_ext.geometry.attached_pattern import attach_pattern
from loco_ext.nn.computed import HOW_TO_MAKE_PLAIN, Computed, computed, is_convolution
from loco_ext.nn.locally_connected import LocallyConnectedNd
from loco_ext.optim.locality import Factors, as_tuples, check_factors
from loco_ext.optim.options import check_hyper, is_zero
from loco_ext.optim.penalty import check_penalty
from loco_ext.penalties import KernelPenalty, Penalty, RingPenalty
from loco_ext.warning import warn_caller

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    locality: Factors | None = None,
    penalty: Penalty | Mapping[str, Penalty | None] | None = None,
    per_layer: Mapping[str, Factors | None] | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: convolution weights, other decayed weights, and undecayed parameters.

    The groups are:

    - *Convolution weights*: those of Conv and ConvTranspose modules, and the blocks of locally connected layers. Each
      layer named in ``per_layer`` gets its own entry, all others get ``locality``. All but those of ConvTranspose
      modules also get ``penalty``, 1x1 convolutions included. The decay of a block depends on its distance from the
      middle of its output pixel's receptive field (:func:`loco_ext.geometry.block_decay_map`), also after growth and
      pruning.
    - *Other decayed weights*: everything that is in no other group, including position embeddings of any shape. Their
      decay is uniform.
    - *Undecayed parameters*: biases, the parameters of normalisation layers and other vectors.

    A shared parameter appears once, with the entry of the first module that has one. Empty groups are left out.

    If torch's weight_norm, spectral_norm or prune computes a convolution's weight, ``locality`` applies to the
    parameter that holds the filters: the direction, the weight before scaling, or the weight before masking. If a scale
    follows, as before batch norm, decay only acts on the ratios of taps. Pruned weights can have a ``RingPenalty`` or a
    ``KernelPenalty``, because its minimum is zero wherever the mask is. Weights that are scaled afterwards cannot,
    because they have no such minimum.

    Args:
        model: frozen parameters are included, so that they can be unfrozen later.
        weight_decay: of the first two groups, in torch's convention (the paper's lambda times 2), finite, at least 0.
        locality: None, ``(gamma, eta)`` or one factor per distance class.
        penalty: None, one penalty for every Conv module's weight, or a mapping from module names to penalties (as from
            :func:`loco_ext.sparsity.folded_penalties`), where modules without an entry have none. A ConvTranspose
            accepts none, because its filters lie along another axis.
        per_layer: a mapping from module names, as in ``model.named_modules()``, to values like ``locality``.

    Raises:
        TypeError, ValueError: naming the argument, the expectation and the value received. Also if ``per_layer`` or
            ``penalty`` names a module that is no convolution of the model, or a convolution whose weight is computed
            such that the entry could not act on it; or if a lazy module has not run yet.

    Warns:
        UserWarning: ``locality`` is given but there is no weight decay, no convolution of more than one tap, or one
            that it cannot act on; or ``penalty`` is given but there is no convolution.

    Example:
        >>> from torch import nn
        >>> from loco_ext import optim
        >>> model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
        >>> groups = optim.parameter_groups(model, 5e-4, locality=(0.5, 2.0), per_layer={"0": (0.7, 1.3)})
        >>> [(len(group["params"]), group["weight_decay"], group["locality"]) for group in groups]
        [(1, 0.0005, [(0.7, 1.3)]), (1, 0.0005, None), (4, 0.0, None)]
    """
    _check_arguments(model, weight_decay, locality, per_layer)
    layers = _layers(model)
    factors_of = _factors_of(layers, locality, per_layer or {})
    penalty_of = _penalty_of(layers, penalty)
    if is_zero(weight_decay) and any(factors is not None for factors in factors_of.values()):
        warn_caller("locality, per_layer: expected a weight_decay above 0 to act on, got 0, so that nothing decays")
    convolutions: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    untouched = _untouched(layers, factors_of, penalty_of)
    for module, name, parameter in _owned_parameters(model):
        if id(parameter) in factors_of and id(parameter) not in untouched:
            convolutions.append(parameter)
        elif isinstance(module, _NORMS) or parameter.dim() < 2 or "bias" in name:
            plain.append(parameter)
        else:
            decayed.append(parameter)
    factors = [factors_of[id(parameter)] for parameter in convolutions]
    penalties = [penalty_of.get(id(parameter)) for parameter in convolutions]
    chosen = penalties if any(penalties) else None
    groups = [
        {"params": convolutions, "weight_decay": weight_decay, "locality": factors, "penalty": chosen},
        {"params": decayed, "weight_decay": weight_decay, "locality": None, "penalty": None},
        {"params": plain, "weight_decay": 0.0, "locality": None, "penalty": None},
    ]
    return [group for group in groups if group["params"]]


@dataclass(frozen=True)
class _Layer:
    """A convolution or a locally connected layer.

    Attributes:
        filters: the parameter that has its filters, tap by tap, or its blocks; None if no parameter has.
        how: how its weight is computed; None if the weight is a parameter.
        may_be_local: whether it has several taps, or blocks, which growth can add.
        may_have_penalty: whether filters lie along the first axis of its weight, or it has blocks.
    """

    filters: nn.Parameter | None
    how: Computed | None
    may_be_local: bool
    may_have_penalty: bool


def _layers(model: nn.Module) -> dict[str, _Layer]:
    """Return each layer under all of its names; also mark the blocks of locally connected layers."""
    layers: dict[str, _Layer] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, LocallyConnectedNd):
            how = computed(module)
            weight = module.weight if how is None else how.filters if how.masked else None
            if weight is not None:
                attach_pattern(weight, module.pattern)  # a replaced parameter, such as a sharded one, is not marked yet
            layers[name] = _Layer(weight, how, may_be_local=True, may_have_penalty=True)
        elif isinstance(module, _ConvNd):
            how = computed(module)
            filters: Any = module.weight if how is None else how.filters
            layers[name] = _Layer(filters, how, math.prod(module.kernel_size) > 1, is_convolution(module))
    return layers


def _untouched(
    layers: dict[str, _Layer], factors_of: Mapping[int, Factors | None], penalty_of: Mapping[int, Any]
) -> set[int]:
    """Return the ids of parameters behind computed weights that nothing acts on; they are treated like any other."""
    computed_filters = {id(layer.filters) for layer in layers.values() if layer.how is not None}
    return {key for key in computed_filters if factors_of.get(key) is None and penalty_of.get(key) is None}


def _factors_of(
    layers: dict[str, _Layer], locality: Factors | None, per_layer: Mapping[str, Factors | None]
) -> dict[int, Factors | None]:
    """Return the factors of each layer, by the id of the parameter with its filters."""
    if unknown := sorted(set(per_layer) - set(layers)):
        raise ValueError(f"per_layer: expected names of convolutions of the model, got {unknown}")
    for name, factors in per_layer.items():
        if factors is not None and (layer := layers[name]).filters is None:
            raise ValueError(
                "per_layer: expected convolutions whose weight is a parameter, or computed tap by tap from one, got "
                f"{name!r}, whose weight {_by(layer)} computes; {HOW_TO_MAKE_PLAIN}, or leave the name out"
            )
    if locality is not None:
        if not any(layer.may_be_local for layer in layers.values()):
            warn_caller(
                "locality: expected a model with convolutions of more than one tap, got one without, so that all decay "
                "is uniform"
            )
        computed_otherwise = [name for name, layer in layers.items() if layer.how and layer.filters is None]
        if unreached := [name for name in computed_otherwise if name not in per_layer]:
            warn_caller(
                f"locality: expected weights that are parameters, or computed tap by tap from one, got {unreached}, "
                f"computed by {', '.join(sorted({_by(layers[name]) for name in unreached}))}: their decay is uniform, "
                "which None in per_layer accepts"
            )
    return _by_parameter(layers, per_layer, locality)


def _penalty_of(
    layers: dict[str, _Layer], penalty: Penalty | Mapping[str, Penalty | None] | None
) -> dict[int, Penalty | None]:
    """Return the penalty of each layer, by the id of the parameter with its filters."""
    able = {name: layer for name, layer in layers.items() if layer.may_have_penalty}
    if not isinstance(penalty, Mapping):
        check_penalty("penalty", penalty)
        if penalty is not None and not able:
            warn_caller("penalty: expected a model with convolutions, got one without, so that nothing is penalised")
    entries = penalty if isinstance(penalty, Mapping) else dict.fromkeys(able, penalty)
    if unknown := sorted(set(entries) - set(able)):
        raise ValueError(f"penalty: expected names of Conv modules of the model, got {unknown}")
    for name, entry in entries.items():
        check_penalty(f"penalty[{name!r}]", entry)
        if entry is not None and not _has_minimum(able[name], entry):
            raise ValueError(
                "penalty: expected weights that are parameters, or pruned ones with a RingPenalty or KernelPenalty, "
                f"got a {type(entry).__name__} for {name!r}, whose weight {_by(able[name])} computes; "
                f"{HOW_TO_MAKE_PLAIN}, or give the penalties of other layers by name"
            )
    return _by_parameter(able, entries, None)


def _has_minimum(layer: _Layer, penalty: Penalty) -> bool:
    """Return whether the penalty of the layer's parameter is least where that of its computed weight is.

    Masked elements are zero at the parameter's minimum, and the others then agree. A :class:`FoldedPenalty` keeps the
    norm of its parameter, masked elements included, and would let these grow.
    """
    if layer.how is None:
        return True
    return layer.how.masked and layer.filters is not None and isinstance(penalty, RingPenalty | KernelPenalty)


_Entry = TypeVar("_Entry")


def _by_parameter(
    layers: dict[str, _Layer], entries: Mapping[str, _Entry | None], default: _Entry | None
) -> dict[int, _Entry | None]:
    """Return each layer's entry, by the id of its parameter; of several layers that share one, the first named wins."""
    named = {id(layer.filters): entries[name] for name, layer in reversed(layers.items()) if name in entries}
    parameters = [layer.filters for layer in layers.values() if layer.filters is not None]
    return {id(parameter): named.get(id(parameter), default) for parameter in parameters}


def _by(layer: _Layer) -> str:
    return "" if layer.how is None else layer.how.by


def _check_arguments(model: object, weight_decay: object, locality: object, per_layer: object) -> None:
    check_module("model", model)
    check_hyper({"weight_decay": weight_decay})
    check_factors("locality", as_tuples([locality])[0])
    if not isinstance(per_layer, Mapping | None):
        raise TypeError(f"per_layer: expected a mapping of module names to factors, got {per_layer!r}")
    for name, factors in (per_layer or {}).items():
        check_factors(f"per_layer[{name!r}]", as_tuples([factors])[0])


def _owned_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield each parameter once, with the first module that has it and its name there."""
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, UninitializedParameter):
                raise ValueError(
                    f"model: expected initialised parameters, {module_name}.{name} is lazy; run the model once"
                )
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield module, name, parameter
