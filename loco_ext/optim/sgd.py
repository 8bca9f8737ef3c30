"""SGD with locality-promoting weight decay."""

from typing import Any

import torch
from torch import Tensor

from loco_ext import compiler
from loco_ext.ops import step_args
from loco_ext.optim.base import LocalityOptimizer
from loco_ext.optim.locality import Locality
from loco_ext.optim.options import Group
from loco_ext.penalties import Penalty


class SGD(LocalityOptimizer, torch.optim.SGD):
    """torch.optim.SGD in one fused call for all parameters, with weight decay that may depend on the tap.

    Without ``locality`` it is torch's optimizer: same arguments, same results, same checkpoints. With ``locality``, the
    decay of a convolution's weights is multiplied by a map over the kernel's taps, whose mean is 1 (LOCO-REG, section
    6, eq. 6.1). The paper's loss ``lambda*w^2`` has the gradient ``2*lambda*w``, so torch's ``weight_decay`` is
    ``2*lambda``.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD.
        foreach: True uses torch's foreach path, after the map has been applied.
        differentiable: True uses torch's differentiable path, after the map has been applied.
        fused: None or True uses this package's kernels; with True they also unscale gradients for GradScaler. False
            uses the PyTorch reference.
        locality: None, ``(gamma, eta)``, one factor per distance class (a tuple), or a list with one such entry per
            parameter of the group. A tuple applies to parameters of 3 to 5 dimensions with spatial sizes up to 15 and
            more than one tap; even sizes decay uniformly, with a warning. :func:`parameter_groups` finds convolutions
            by module type instead.
        penalty: None, a :class:`loco_ext.sparsity.RingPenalty`, ``KernelPenalty`` or ``FoldedPenalty``, or a list with
            one such entry per parameter. A single penalty applies to the same parameters as a tuple ``locality``. Every
            step ends with the penalty's exact prox, so rings and filters become exactly zero. The strength is relative
            to the loss: the thresholds are ``lr * strength * (1 - dampening) / (1 - momentum)``.
        norm: ``"l2"``, or ``"l1"`` for a decay of constant size (gradient ``weight_decay * map * sign(w)``).
        state_dtype: ``torch.float32`` keeps the states of bfloat16 and float16 parameters in float32.
        stochastic_rounding: a seed; bfloat16 parameters and states are then rounded stochastically.

    .. warning::
        In a bare list of parameters, the weight of a ConvTranspose looks like that of a convolution. A single penalty
        would treat the slices along its first axis, the input channels, as filters, but its filters lie along the
        second axis. :func:`parameter_groups` gives such a weight no penalty, and refuses a penalty for weights that
        torch's weight_norm or spectral_norm scales.

    Raises:
        TypeError, ValueError: naming the argument, the expectation and the value received.

    Example:
        >>> import torch, loco_ext
        >>> conv = torch.nn.Conv2d(3, 8, 3)
        >>> optimizer = loco_ext.optim.SGD(conv.parameters(), lr=0.1, weight_decay=5e-4, locality=(0.5, 2.0))
        >>> conv(torch.randn(1, 3, 8, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    @compiler.disable
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        locality: Locality = None,
        penalty: Penalty | list[Penalty | None] | None = None,
        norm: str = "l2",
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: int | None = None,
    ) -> None:
        self._construct(locals())

    _rule = step_args.SGD

    def _hyper(self, group: Group) -> tuple[Any, ...]:
        return group["weight_decay"], group["momentum"], group["dampening"]
