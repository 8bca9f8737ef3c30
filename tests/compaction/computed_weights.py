"""The ways in which torch computes a convolution's weight from other parameters."""

from collections.abc import Callable

from torch import nn
from torch.nn.utils import parametrizations, prune

WAYS: dict[str, Callable[[nn.Module], object]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "weight norm by a hook": nn.utils.weight_norm,
    "spectral norm by a hook": nn.utils.spectral_norm,
    "pruning": lambda module: prune.ln_structured(module, "weight", 0.5, 2, 0),
    "orthogonal": parametrizations.orthogonal,  # this one mixes taps
}
