"""Adam and AdamW with locality-promoting weight decay."""

from typing import Any

import torch
from torch import Tensor

from loco_ext import compiler
from loco_ext.ops.step_args import ADAM
from loco_ext.optim.base import LocalityOptimizer
from loco_ext.optim.locality import Locality
from loco_ext.optim.options import Group
from loco_ext.penalties import Penalty


class _FusedAdam(LocalityOptimizer):
    """The fused step shared by Adam and AdamW."""

    _rule = ADAM

    def _hyper(self, group: Group) -> tuple[Any, ...]:
        return group["weight_decay"], *group["betas"], group["eps"]


class Adam(_FusedAdam, torch.optim.Adam):
    """torch.optim.Adam in one fused call for all parameters, with weight decay that may depend on the tap.

    Decay is coupled: ``weight_decay * map * w`` is added to the gradient, as in the paper's loss. A ``penalty`` is
    applied as a prox in Adam's own metric ``(sqrt(v_hat) + eps) / lr``, so it leads to the same minimum as with SGD.
    ``locality``, ``norm``, ``state_dtype``, ``stochastic_rounding``, ``fused``, ``foreach`` and ``differentiable`` are
    as for :class:`loco_ext.optim.SGD`; all other arguments are torch.optim.Adam's.

    .. warning::
        As in :class:`loco_ext.optim.SGD`, a single penalty with a bare list of parameters mistakes the weight of a
        ConvTranspose, whose filters lie along another axis, for a convolution's; use :func:`parameter_groups`.

    Raises:
        TypeError, ValueError: naming the argument, the expectation and the value received.

    Example:
        >>> import torch, loco_ext
        >>> conv = torch.nn.Conv2d(3, 8, 5)
        >>> optimizer = loco_ext.optim.Adam(conv.parameters(), weight_decay=1e-4, locality=(0.5, 2.0), norm="l1")
        >>> conv(torch.randn(1, 3, 8, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    @compiler.disable
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        locality: Locality = None,
        penalty: Penalty | list[Penalty | None] | None = None,
        norm: str = "l2",
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: int | None = None,
    ) -> None:
        self._construct(locals())


class AdamW(_FusedAdam, torch.optim.AdamW):
    """torch.optim.AdamW in one fused call for all parameters, with weight decay that may depend on the tap.

    Decay is decoupled: weights are multiplied by ``1 - lr * weight_decay * map``. A ``penalty`` (see :class:`Adam`)
    leads to the minimum of an objective that does not include this decay. ``locality``, ``state_dtype``,
    ``stochastic_rounding``, ``fused``, ``foreach`` and ``differentiable`` are as for :class:`loco_ext.optim.SGD`; all
    other arguments are torch.optim.AdamW's. L1 decay is coupled by nature and needs Adam or SGD.

    .. warning::
        As in :class:`loco_ext.optim.SGD`, a single penalty with a bare list of parameters mistakes the weight of a
        ConvTranspose, whose filters lie along another axis, for a convolution's; use :func:`parameter_groups`.

    Raises:
        TypeError, ValueError: naming the argument, the expectation and the value received.

    Example:
        >>> import torch, loco_ext
        >>> conv = torch.nn.Conv2d(3, 8, 3)
        >>> optimizer = loco_ext.optim.AdamW(conv.parameters(), weight_decay=0.05, locality=(0.5, 2.0))
        >>> conv(torch.randn(1, 3, 8, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    @compiler.disable
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        locality: Locality = None,
        penalty: Penalty | list[Penalty | None] | None = None,
        norm: str = "l2",
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: int | None = None,
    ) -> None:
        self._construct(locals())
