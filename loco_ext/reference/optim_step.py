"""One SGD, Adam or AdamW step over lists of tensors, in plain PyTorch.

The functions take the arguments of the operators ``optim_step_sgd`` and ``optim_step_adam``, described in
:mod:`loco_ext.ops.optim_step`. Operations, order and fused multiply-adds match those of the kernels, so that in float32
both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loco_ext.reference.ring_prox import ring_prox
from loco_ext.reference.rounding import RoundedResults

SGD_COLUMNS = ("lr", "weight_decay", "momentum", "dampening")
ADAM_COLUMNS = ("lr", "weight_decay", "beta1", "beta2", "eps")


def arithmetic_dtype(param: Tensor) -> torch.dtype:
    """Return the compute dtype: float64 for float64 parameters, float32 for all others."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def optim_step_sgd(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    first: Sequence[int],
    group_index: Sequence[int],
    hyper: Tensor,
    lrs: Sequence[Tensor],
    lr_index: Sequence[int],
    maps: Sequence[Tensor],
    map_index: Sequence[int],
    penalties: Sequence[Any],
    nesterov: bool,
    maximize: bool,
    l1: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    ordinals: Sequence[int],
    seed: int | None,
    rounding_step: int,
) -> None:
    """Make an SGD step with momentum; see :func:`loco_ext.ops.optim_step_sgd`."""
    if found_inf is not None and found_inf.item() != 0:
        return
    rows = _rows(hyper, lrs, lr_index)
    for i, param in enumerate(params):
        lr, weight_decay, momentum, dampening = rows[group_index[i]]
        w = param.to(arithmetic_dtype(param))
        g = _gradient(grads[i], w, grad_scale, maximize)
        d = _decayed(g, w, weight_decay, _map(maps, map_index[i]), l1)
        words = RoundedResults(param, ordinals, i, seed, rounding_step)
        if momentum_buffers:
            buffer = momentum_buffers[i]
            b = d if first and first[i] else _fma(1 - dampening, d, buffer.to(w.dtype) * momentum)
            words.store(buffer, b, 1)
            d = _fma(momentum, b, d) if nesterov else b
        w = _fma(-lr, d, w)
        if penalties and penalties[i] is not None:
            steps = _undamped(momentum, dampening) if momentum_buffers else 1.0
            w = _prox(w, penalties[i], lr * steps, None)
        words.store(param, w, 0)


def optim_step_adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    group_index: Sequence[int],
    hyper: Tensor,
    lrs: Sequence[Tensor],
    lr_index: Sequence[int],
    maps: Sequence[Tensor],
    map_index: Sequence[int],
    penalties: Sequence[Any],
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
    l1: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    ordinals: Sequence[int],
    seed: int | None,
    rounding_step: int,
) -> None:
    """Make an Adam (coupled decay) or AdamW (decoupled) step; see :func:`loco_ext.ops.optim_step_adam`."""
    if found_inf is not None and found_inf.item() != 0:
        return
    rows = _rows(hyper, lrs, lr_index)
    for i, param in enumerate(params):
        lr, weight_decay, beta1, beta2, eps = rows[group_index[i]]
        steps[i] += 1
        step = steps[i].item()
        w = param.to(arithmetic_dtype(param))
        g = _gradient(grads[i], w, grad_scale, maximize)
        decay_map = _map(maps, map_index[i])
        if decoupled and weight_decay != 0:
            w = w * _cast(1 - lr * weight_decay * decay_map, w)
        d = g if decoupled else _decayed(g, w, weight_decay, decay_map, l1)
        words = RoundedResults(param, ordinals, i, seed, rounding_step)

        m = exp_avgs[i].to(w.dtype)
        from_end = 1 - beta1 >= 0.5  # as torch.lerp does, so that a weight of 1 gives d exactly
        m = _fma(_cast(1 - beta1, w).item() - 1, d - m, d) if from_end else _fma(1 - beta1, d - m, m)
        v = _fma((1 - beta2) * d, d, exp_avg_sqs[i].to(w.dtype) * beta2)
        words.store(exp_avgs[i], m, 1)
        words.store(exp_avg_sqs[i], v, 2)
        if amsgrad:
            v = torch.maximum(max_exp_avg_sqs[i].to(w.dtype), v)
            words.store(max_exp_avg_sqs[i], v, 3)
        denominator = correctly_rounded_sqrt(v) / (1 - beta2**step) ** 0.5 + eps
        w = w + -(lr / (1 - beta1**step)) * m / denominator
        if penalties and penalties[i] is not None and lr != 0:
            w = _prox(w, penalties[i], 1.0, denominator / lr)
        words.store(param, w, 0)


def _undamped(momentum: float, dampening: float) -> float:
    """Return the step size that a constant gradient approaches, in units of the learning rate."""
    return (1 - dampening) / (1 - momentum)


def _prox(w: Tensor, penalty: Any, step: float, metric: Tensor | None) -> Tensor:
    if hasattr(penalty, "prox"):  # a LayerPenalty
        return penalty.prox(w, step, metric)
    thresholds, squared = penalty.scaled(step)
    return ring_prox(w, penalty.rings, thresholds, squared, metric, penalty.linf, penalty.joint)


def _rows(hyper: Tensor, lrs: Sequence[Tensor], lr_index: Sequence[int]) -> list[list[float]]:
    rows = hyper.tolist()
    for row, which in zip(rows, lr_index, strict=False):
        if which >= 0:
            row[0] = lrs[which].item()
    return rows


def _gradient(grad: Tensor, w: Tensor, grad_scale: Tensor | None, maximize: bool) -> Tensor:
    g = grad.to(w.dtype)
    if grad_scale is not None:
        g = g / grad_scale.item()
        grad.copy_(g)
    return -g if maximize else g


def _fma(a: Tensor | float, b: Tensor, c: Tensor) -> Tensor:
    """Return a*b + c, rounded once in float32 (float32 products are exact in float64), rounded twice in float64."""
    a = _cast(a, c)
    if not _can_double(c):
        return a * b + c
    return (a.double() * b.double() + c.double()).float()


def correctly_rounded_sqrt(v: Tensor) -> Tensor:
    """Return the correctly rounded square root, as the kernels do; torch's in float32 may be off by an ulp."""
    return v.double().sqrt().float() if _can_double(v) else v.sqrt()


def _can_double(value: Tensor) -> bool:
    return value.dtype == torch.float32 and value.device.type != "mps"


def _cast(coefficient: Tensor | float, like: Tensor) -> Tensor:
    """Return a coefficient computed in float64, at the precision and on the device of ``like``."""
    if not isinstance(coefficient, Tensor):
        coefficient = torch.tensor(coefficient, dtype=torch.float64, device="cpu")
    return coefficient.double().to(like.dtype).to(like.device)


def _map(maps: Sequence[Tensor], index: int) -> Tensor | float:
    return 1.0 if index < 0 else maps[index]


def _decayed(g: Tensor, w: Tensor, weight_decay: float, decay_map: Tensor | float, l1: bool) -> Tensor:
    if weight_decay == 0:
        return g
    return _fma(weight_decay * decay_map, torch.sign(w) if l1 else w, g)
