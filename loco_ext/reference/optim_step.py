"""One SGD, Adam or AdamW step over lists of tensors, in plain PyTorch.

Operations, order and fused multiply-adds match those of the kernels, so that in float32 both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from loco_ext.ops.step_args import SGD, StepArgs
from loco_ext.reference.ring_prox import ring_prox
from loco_ext.reference.rounding import RoundedResults

# A parameter after its step, and the step size and the metric (None: none) of the prox that may follow.
_Stepped: TypeAlias = tuple[Tensor, float, Callable[[], Tensor] | None]


def arithmetic_dtype(param: Tensor) -> torch.dtype:
    """Return the compute dtype: float64 for float64 parameters, float32 for all others."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def optim_step(args: StepArgs) -> None:
    """Make the step; see :func:`loco_ext.ops.optim_step_sgd` and :func:`loco_ext.ops.optim_step_adam`."""
    if args.found_inf is not None and args.found_inf.item() != 0:
        return
    rows = _rows(args)
    for i, param in enumerate(args.params):
        w = param.to(arithmetic_dtype(param))
        g = _gradient(args.grads[i], w, args.grad_scale, args.flags.maximize)
        words = RoundedResults(param, args.ordinals, i, args.seed, args.rounding_step)
        step = _sgd if args.rule is SGD else _adam
        w, size, metric = step(args, i, rows[args.group_of(i)], w, g, words)
        penalty = args.penalty_of(i)
        if penalty is not None and size != 0:
            w = _prox(w, penalty, size, None if metric is None else metric())
        words.store(param, w, 0)


def _sgd(args: StepArgs, i: int, row: list[float], w: Tensor, g: Tensor, words: RoundedResults) -> _Stepped:
    lr, weight_decay, momentum, dampening = row
    d = _decayed(g, w, weight_decay, args.map_of(i), args.flags.l1)
    for buffers in args.states:  # none without momentum
        first = args.first and args.first[i]
        b = d if first else _fma(1 - dampening, d, buffers[i].to(w.dtype) * momentum)
        words.store(buffers[i], b, 1)
        d = _fma(momentum, b, d) if args.flags.nesterov else b
    return _fma(-lr, d, w), lr * (_undamped(momentum, dampening) if args.states else 1.0), None


def _adam(args: StepArgs, i: int, row: list[float], w: Tensor, g: Tensor, words: RoundedResults) -> _Stepped:
    lr, weight_decay, beta1, beta2, eps = row
    exp_avgs, exp_avg_sqs, *max_exp_avg_sqs = args.states
    args.steps[i].add_(1)
    step = args.steps[i].item()
    decay_map, decoupled = args.map_of(i), args.flags.decoupled
    if decoupled and weight_decay != 0:
        w = w * _cast(1 - lr * weight_decay * (1.0 if decay_map is None else decay_map), w)
    d = g if decoupled else _decayed(g, w, weight_decay, decay_map, args.flags.l1)
    m = exp_avgs[i].to(w.dtype)
    from_end = 1 - beta1 >= 0.5  # as torch.lerp does, so that a weight of 1 gives d exactly
    m = _fma(_cast(1 - beta1, w).item() - 1, d - m, d) if from_end else _fma(1 - beta1, d - m, m)
    v = _fma((1 - beta2) * d, d, exp_avg_sqs[i].to(w.dtype) * beta2)
    words.store(exp_avgs[i], m, 1)
    words.store(exp_avg_sqs[i], v, 2)
    if args.flags.amsgrad:
        v = torch.maximum(max_exp_avg_sqs[0][i].to(w.dtype), v)
        words.store(max_exp_avg_sqs[0][i], v, 3)
    denominator = correctly_rounded_sqrt(v) / (1 - beta2**step) ** 0.5 + eps
    w = w + -(lr / (1 - beta1**step)) * m / denominator
    return w, float(lr != 0), lambda: denominator / lr


def _undamped(momentum: float, dampening: float) -> float:
    """Return the step size that a constant gradient approaches, in units of the learning rate."""
    return (1 - dampening) / (1 - momentum)


def _prox(w: Tensor, penalty: Any, step: float, metric: Tensor | None) -> Tensor:
    if hasattr(penalty, "prox"):  # a LayerPenalty
        return penalty.prox(w, step, metric)
    thresholds, squared = penalty.scaled(step)
    return ring_prox(w, penalty.rings, thresholds, squared, metric, penalty.linf, penalty.joint)


def _rows(args: StepArgs) -> list[list[float]]:
    rows = args.hyper.tolist()
    for group, row in enumerate(rows):
        if (lr := args.lr_of(group)) is not None:
            row[0] = lr.item()
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


def _decayed(g: Tensor, w: Tensor, weight_decay: float, decay_map: Tensor | None, l1: bool) -> Tensor:
    if weight_decay == 0:
        return g
    factor = weight_decay if decay_map is None else weight_decay * decay_map
    return _fma(factor, torch.sign(w) if l1 else w, g)
