"""Weights that a module computes from other parameters: by parametrizations, or by the hooks of torch.nn.utils."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.parametrizations import _SpectralNorm, _WeightNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from loco_ext.argument_checks import check_module
from loco_ext.nn.modes import evaluating

HOW_TO_MAKE_PLAIN = "remove_parametrizations, remove_weight_norm, remove_spectral_norm or prune.remove makes it one"


@dataclass(frozen=True)
class Computed:
    """The way in which a module computes a weight.

    Attributes:
        by: name of what computes it, for messages.
        filters: the parameter whose filters are those of the weight, tap by tap, up to one factor for each filter or
            for all of them, or up to masked taps; None if no such parameter is known.
        masked: whether the weight is ``filters`` with some elements set to zero.
    """

    by: str
    filters: nn.Parameter | None
    masked: bool = False


def computed(module: nn.Module) -> Computed | None:
    """Return how the module computes its weight; None if it is stored or does not exist."""
    parameters: dict[str, Any] = module._parameters
    if "weight" in parameters:
        return None
    if parametrize.is_parametrized(module, "weight"):
        return _parametrized(module.parametrizations["weight"])  # type: ignore[index, arg-type]
    hook = _hooks(module).get("weight")
    if isinstance(hook, prune.BasePruningMethod):
        return Computed("pruning", parameters.get("weight_orig"), masked=True)
    if isinstance(hook, SpectralNorm):
        return Computed("SpectralNorm", parameters.get("weight_orig"))
    if isinstance(hook, WeightNorm):
        return Computed("WeightNorm", parameters.get("weight_v") if _keeps_taps(hook) else None)
    stored = "weight" in module._buffers or getattr(module, "weight", None) is None
    return None if stored else Computed("code of its own", None)


def weight_of(module: _ConvNd) -> Tensor:
    """Return a convolution's weight, as :func:`tensor_of` does."""
    return tensor_of(module, "weight")


@torch.no_grad()
def tensor_of(module: _ConvNd, name: str) -> Any:
    """Return a convolution's weight or bias as computed in eval mode; hooks only keep that of the last forward."""
    hook = _hooks(module).get(name)
    if isinstance(hook, prune.BasePruningMethod):
        return hook.apply_mask(module)
    if isinstance(hook, SpectralNorm):
        return hook.compute_weight(module, do_power_iteration=False)
    if isinstance(hook, WeightNorm):
        return hook.compute_weight(module)
    if not parametrize.is_parametrized(module, name):
        return getattr(module, name)
    parts: Any = module.parametrizations
    with evaluating(parts):
        return getattr(module, name)


def is_convolution(module: nn.Module) -> bool:
    """Return whether the module is a convolution that is not transposed, so that the first axis is that of filters."""
    return isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd)


def check_plain(model: nn.Module) -> None:
    """Raise TypeError or ValueError unless this is a model whose Conv modules all have parameters as weights."""
    check_module("model", model)
    for name, module in model.named_modules():
        if is_convolution(module):
            check_plain_weight(name, module)


def check_plain_weight(name: str, module: nn.Module) -> None:
    """Raise ValueError unless the weight of a model's convolution is a parameter."""
    if (how := computed(module)) is not None:
        raise ValueError(
            f"model: expected convolutions whose weights are parameters, got {name!r}, whose weight {how.by} computes; "
            f"{HOW_TO_MAKE_PLAIN}"
        )


def make_weights_plain(model: nn.Module) -> None:
    """Replace each tensor that a module computes by a parameter with its value, in place, for a model in eval mode.

    No parametrizations and no hooks of weight_norm, spectral_norm and prune remain. The class of a parametrized module
    is shared by its copies and is not changed, whereas torch's remove_parametrizations would change it.
    """
    for module in list(model.modules()):
        for name, hook in reversed(_hooks(module).items()):  # a later hook may produce the input of an earlier one
            if isinstance(hook, prune.BasePruningMethod):
                prune.remove(module, name)
            elif isinstance(hook, SpectralNorm):
                remove_spectral_norm(module, name)
            else:
                remove_weight_norm(module, name)
        if parametrize.is_parametrized(module):
            _remove_parametrizations(module)


@torch.no_grad()
def _remove_parametrizations(module: nn.Module) -> None:
    lists: Any = module.parametrizations
    values: dict[str, Tensor] = {name: getattr(module, name).detach().clone() for name in lists}
    module.__class__ = parametrize.type_before_parametrizations(module)
    del module.parametrizations
    for name, value in values.items():
        originals = list(lists[name].parameters(recurse=False))
        if originals:
            module.register_parameter(name, nn.Parameter(value, any(p.requires_grad for p in originals)))
        else:
            module.register_buffer(name, value)


def has_foreign_hooks(module: nn.Module) -> bool:
    """Return whether a call of the module does more than compute its result, beside computing its weights by hooks."""
    hooks = (
        *(*module._forward_hooks.values(), *module._forward_pre_hooks.values()),
        *(*module._backward_hooks.values(), *module._backward_pre_hooks.values()),
    )
    return not all(isinstance(hook, prune.BasePruningMethod | SpectralNorm | WeightNorm) for hook in hooks)


def _hooks(module: nn.Module) -> dict[str, Any]:
    """Return the hooks of prune, spectral_norm and weight_norm, by the name of the tensor that each computes."""
    hooks = module._forward_pre_hooks.values()
    named = {hook._tensor_name: hook for hook in hooks if isinstance(hook, prune.BasePruningMethod)}
    return {**{hook.name: hook for hook in hooks if isinstance(hook, SpectralNorm | WeightNorm)}, **named}


def _parametrized(parts: parametrize.ParametrizationList) -> Computed:
    by = ", ".join(type(part).__name__.removeprefix("_") for part in parts)
    first, *others = parts
    known = isinstance(first, _SpectralNorm) or (isinstance(first, _WeightNorm) and _keeps_taps(first))
    filters = None
    if known and all(isinstance(part, _SpectralNorm) for part in others):
        filters = parts._parameters.get("original1" if isinstance(first, _WeightNorm) else "original")
    return Computed(by, filters)


def _keeps_taps(norm: Any) -> bool:
    """Return whether a weight norm has one factor for all taps of a filter: its dim is one of channels, or -1, all."""
    return norm.dim < 2
