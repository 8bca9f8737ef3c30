"""One SGD, Adam or AdamW step over lists of tensors, in plain PyTorch.

Operations, order and fused multiply-adds match those of the kernels, so that in float32 both give the same bits.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from loco_ext.ops.step_args import SGD, Rule, StepArgs
from loco_ext.reference.dtypes import compute_dtype
from loco_ext.reference.ring_prox import ring_prox
from loco_ext.reference.rounding import RoundedResults

# A parameter after its step, and its last state, None if it has none; both in the compute dtype.
_Stepped: TypeAlias = tuple[Tensor, Tensor | None]


def optim_step(args: StepArgs) -> None:
    """Make the step; see :func:`loco_ext.ops.optim_step_sgd` and :func:`loco_ext.ops.optim_step_adam`."""
    if args.found_inf is not None and args.found_inf.item() != 0:
        return
    for i, param in enumerate(args.params):
        w = param.to(compute_dtype(param.dtype))
        g = _gradient(args.grads[i], w, args.grad_scale, args.flags.maximize)
        words = RoundedResults(param, args.ordinals, i, args.seed, args.rounding_step)
        row = args.row_of(i)
        row[0] = float(row[0])
        w, last = (_sgd if args.rule is SGD else _adam)(args, i, row, w, g, words)
        if args.penalties and (penalty := args.penalties[i]) is not None:
            step = args.steps[i].item() if args.rule.counts_steps else None
            w = _prox(w, penalty, *prox_sizes(args.rule, [row], [last], [step])[0])
        words.store(param, w, 0)


def prox_sizes(
    rule: Rule, rows: Sequence[Sequence[Any]], lasts: Sequence[Tensor | None], steps: Sequence[Any]
) -> list[tuple[Any, Tensor | None]]:
    """Return the size of the prox that ends each parameter's step, and its metric times that size (None: ones).

    On a GPU, the square roots of all parameters share launches.

    Args:
        rule: the step's rule.
        rows: hyper-parameters, ``rule.columns``; the size is a tensor where the learning rate is one.
        lasts: each parameter's last state after the step, in the compute dtype; None if it has none.
        steps: step counts, numbers or tensors; any values unless ``rule.counts_steps``.
    """
    if rule is SGD:
        return [
            (_at_least_0(lr if last is None else lr * ((1 - dampening) / (1 - momentum))), None)
            for (lr, _, momentum, dampening), last in zip(rows, lasts, strict=True)
        ]
    lrs, _, _, beta2s, epsilons = zip(*rows, strict=True)
    metrics = _denominators([last for last in lasts if last is not None], steps, beta2s, epsilons)
    return list(zip(map(_at_least_0, lrs), metrics, strict=True))


def _at_least_0(size: Any) -> Any:
    """Return the size of a prox, or 0 if a schedule has rounded the learning rate below 0."""
    return size.clamp(min=0) if isinstance(size, Tensor) else max(size, 0.0)


def _denominators(
    vs: list[Tensor], steps: Sequence[Any], beta2s: Sequence[float], epsilons: Sequence[float]
) -> list[Tensor]:
    """Return Adam's ``sqrt(v / (1 - beta2^step)) + eps`` of each parameter."""
    roots = _correctly_rounded_sqrts(vs)
    torch._foreach_div_(roots, _corrections(roots, steps, beta2s))
    torch._foreach_add_(roots, epsilons)
    return roots


def _corrections(roots: list[Tensor], steps: Sequence[Any], beta2s: Sequence[float]) -> list[Tensor]:
    """Return ``sqrt(1 - beta2^step)`` of each parameter in the dtype and on the device of its root."""
    kinds = {
        (beta2, root.dtype, root.device, step.device if isinstance(step, Tensor) else None)
        for beta2, root, step in zip(beta2s, roots, steps, strict=True)
    }
    if len(kinds) == 1 and isinstance(steps[0], Tensor):  # one launch for all parameters
        ((beta2, dtype, device, _),) = kinds
        counted = torch.stack([step.reshape(()) for step in steps]).double()
        return list(((1 - beta2**counted) ** 0.5).to(dtype).to(device).unbind())
    counts = [step.double() if isinstance(step, Tensor) else step for step in steps]
    divisors = [(1 - beta2**count) ** 0.5 for beta2, count in zip(beta2s, counts, strict=True)]
    return [_cast(divisor, root) for divisor, root in zip(divisors, roots, strict=True)]


def _sgd(args: StepArgs, i: int, row: list[float], w: Tensor, g: Tensor, words: RoundedResults) -> _Stepped:
    lr, weight_decay, momentum, dampening = row
    b = None
    d = _decayed(g, w, weight_decay, args.map_of(i), args.flags.l1)
    for buffers in args.states:  # none without momentum
        first = args.first and args.first[i]
        b = d if first else _fma(1 - dampening, d, buffers[i].to(w.dtype) * momentum)
        words.store(buffers[i], b, 1)
        d = _fma(momentum, b, d) if args.flags.nesterov else b
    return _fma(-lr, d, w), b


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
    return w + -(lr / (1 - beta1**step)) * m / _denominators([v], [step], [beta2], [eps])[0], v


def _prox(w: Tensor, penalty: Any, size: float, divisor: Tensor | None) -> Tensor:
    if size == 0:
        return w
    step, metric = (size, None) if divisor is None else (1.0, divisor / size)
    if hasattr(penalty, "prox"):  # a LayerPenalty
        return penalty.prox(w, step, metric)
    thresholds, squared = penalty.scaled(step)
    return ring_prox(w, penalty.rings, thresholds, squared, metric, penalty.linf, penalty.joint)


def _gradient(grad: Tensor, w: Tensor, grad_scale: Tensor | None, maximize: bool) -> Tensor:
    g = grad.to(w.dtype)
    if grad_scale is not None:
        g = g / grad_scale.item()
        grad.copy_(g)
    return -g if maximize else g


def _fma(a: Tensor | float, b: Tensor, c: Tensor) -> Tensor:
    """Return a*b + c, with its exact product in float32.

    The sum is then rounded to float64 and to float32, so that about one sum in 2**28 differs by an ulp from a sum that
    is rounded once. In float64 the product is rounded, too.
    """
    a = _cast(a, c)
    if not _can_double(c):
        return a * b + c
    return (a.double() * b.double() + c.double()).float()


def _correctly_rounded_sqrts(vs: list[Tensor]) -> list[Tensor]:
    """Return the correctly rounded square roots, as the kernels do; torch's in float32 may be off by an ulp."""
    wide = [torch.empty_like(v, dtype=torch.float64 if _can_double(v) else v.dtype) for v in vs]
    roots = [torch.empty_like(v) for v in vs]
    torch._foreach_copy_(wide, vs)
    torch._foreach_sqrt_(wide)
    torch._foreach_copy_(roots, wide)
    return roots


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
