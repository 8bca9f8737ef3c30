"""Adam and AdamW with locality-promoting weight decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loco_ext.ops.step_args import ADAM, Flags
from loco_ext.optim.base import LocalityOptimizer
from loco_ext.optim.locality import Locality
from loco_ext.optim.options import Group, check_hyper, lr_for, own_options, uses_kernels, with_options
from loco_ext.optim.plan import Batch, check_not_captured
from loco_ext.optim.states import new_state
from loco_ext.penalties import Penalty
from loco_ext.reference.optim_step import arithmetic_dtype, correctly_rounded_sqrt


def _moments(amsgrad: bool) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if amsgrad else ("exp_avg", "exp_avg_sq")


class _FusedAdam(LocalityOptimizer):
    """The fused step shared by Adam and AdamW."""

    _rule = ADAM

    def _prox_size(self, group: Group, param: Tensor) -> tuple[Any, Tensor]:
        state, (_, beta2) = self.state[param], group["betas"]
        second = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].to(arithmetic_dtype(param))
        correction = (1 - beta2 ** state["step"].double()).sqrt().to(second)
        return lr_for(param, group), correctly_rounded_sqrt(second) / correction + group["eps"]

    def _flags(self, group: Group) -> Flags:
        maximize, l1, amsgrad = bool(group["maximize"]), group["norm"] == "l1", bool(group["amsgrad"])
        return Flags(maximize, l1, amsgrad=amsgrad, decoupled=bool(group["decoupled_weight_decay"]))

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return _moments(group["amsgrad"])

    def _row(self, group: Group, lr: Tensor | None) -> list[float]:
        beta1, beta2 = group["betas"]
        rest = map(float, (group["weight_decay"], beta1, beta2, group["eps"]))
        return [float(group["lr"]) if lr is None else 0.0, *rest]

    def _add_states(self, group: Group, params: list[Tensor], batch: Batch) -> None:
        keys = _moments(group["amsgrad"])
        nothing = dict[str, Tensor]()
        states = [self.state.get(p, nothing) for p in params]
        try:
            lists = [[state[key] for state in states] for key in (*keys, "step")]
        except KeyError:
            states = [self._completed(batch, p, group, keys) for p in params]
            lists = [[state[key] for state in states] for key in (*keys, "step")]
        *moments, steps = lists
        for tensors, more in zip(batch.states, moments, strict=False):
            tensors += more
        batch.steps += steps
        if uses_kernels(group, params[0]) and not all([step.is_cuda for step in batch.steps]):
            self._bring_steps(params, batch)

    def _bring_steps(self, params: list[Tensor], batch: Batch) -> None:
        """Move the group's step counts, the batch's last entries, to the GPU: a checkpoint may hold them on the CPU."""
        check_not_captured(params[0])
        base = len(batch.steps) - len(params)
        for i, param in enumerate(params, start=base):
            batch.steps[i] = batch.steps[i].to(param.device)
            batch.created.append((param, "step", batch.steps[i]))

    @torch.inference_mode(False)  # later steps may run outside inference mode
    def _completed(self, batch: Batch, param: Tensor, group: Group, keys: tuple[str, ...]) -> dict[str, Tensor]:
        """Return the parameter's state, completed; new tensors are kept only if the step succeeds."""
        state = self.state.get(param, {})
        made = {key: new_state(param, group) for key in keys if key not in state}
        if "step" not in state:
            on_device = group["capturable"] or group["fused"] or uses_kernels(group, param)
            double = torch.get_default_dtype() == torch.float64 and not group["fused"]
            dtype = torch.float64 if double else torch.float32
            made["step"] = torch.zeros((), dtype=dtype, device=param.device if on_device else "cpu")
        batch.created.extend((param, key, value) for key, value in made.items())
        return {**state, **made}


class Adam(_FusedAdam, torch.optim.Adam):
    """torch.optim.Adam in one fused call for all parameters, with weight decay that may depend on the tap.

    Decay is coupled: ``weight_decay * map * w`` is added to the gradient, as in the paper's loss. A ``penalty`` is
    applied as a prox in Adam's own metric ``(sqrt(v_hat) + eps) / lr``, and so leads to the same minimum as with SGD.
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

    @torch._disable_dynamo
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
        check_hyper({"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        own = own_options(locality, penalty, norm, state_dtype, stochastic_rounding)
        super().__init__(
            with_options(params, own),
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self._finish_init(own)


class AdamW(_FusedAdam, torch.optim.AdamW):
    """torch.optim.AdamW in one fused call for all parameters, with weight decay that may depend on the tap.

    Decay is decoupled: weights are multiplied by ``1 - lr * weight_decay * map``. That is not part of the objective
    whose minimum a ``penalty`` (see :class:`Adam`) leads to. ``locality``, ``state_dtype``, ``stochastic_rounding``,
    ``fused``, ``foreach`` and ``differentiable`` are as for :class:`loco_ext.optim.SGD`; all other arguments are
    torch.optim.AdamW's. L1 decay is coupled by nature and needs Adam or SGD.

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

    @torch._disable_dynamo
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
        check_hyper({"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        own = own_options(locality, penalty, norm, state_dtype, stochastic_rounding)
        super().__init__(
            with_options(params, own),
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self._finish_init(own)
