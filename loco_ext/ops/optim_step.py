"""The fused optimizer step: one call updates all parameters of all groups that share a rule, in place.

Lists have one entry per parameter, in the order of ``params``. ``hyper`` is a float64 CPU tensor with one row per
group, and ``group_index[i]`` is the row of parameter ``i``. ``maps`` are float64 CPU tensors of decay multipliers, each
of any shape that broadcasts to its parameters; ``map_index[i]`` is the index of parameter ``i``'s map, -1 for uniform
decay. The decay coefficient of a weight is the row's ``weight_decay`` times the map's entry for it (LOCO-REG, eq. 6.1;
torch's ``weight_decay`` is 2*lambda).

``penalties`` has one entry for each parameter, or is empty. With a :class:`StepPenalty` the step of a convolution's
weight ends with the exact prox of that penalty. For SGD, thresholds are multiplied by
``lr * (1 - dampening) / (1 - momentum)`` (lr without momentum), those of the squared part by the square root of that.
For Adam, the prox is in the metric ``(sqrt(v / (1 - beta2^t)) + eps) / lr``. Only then do weights converge to the
minimum of loss and penalty. Compiled kernels apply the prox of Euclidean norms at the end of the step. The prox follows
the step in separate calls with ``linf`` or ``joint``, in Triton, and for a :class:`LayerPenalty`, which may be any
function.

``lrs`` are one-element tensors on the parameters' device; ``lr_index[g]`` is the index of the one that replaces the
learning rate in row ``g``, -1 for none. The GPU reads them, ``steps``, ``grad_scale`` and ``found_inf`` itself, without
a host sync.

Parameters, gradients and states may differ in dtype (float32, float64, bfloat16, float16) and strides. Arithmetic is in
float64 for float64 parameters and in float32 for all others, rounded once when stored. ``seed`` makes that rounding
stochastic for bfloat16 parameters and their bfloat16 states (Philox4x32-10 of the element's index, ``ordinals[i]`` and
``rounding_step``: the same for any layout, backend and number of threads).

If ``found_inf`` is not zero, nothing changes. Gradients are divided by ``grad_scale``, also in memory.

All functions here raise TypeError for a wrong dtype, layout or device, ValueError for wrong shapes, lengths or indices
and for memory that would be written twice; nothing is written then.
"""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from loco_ext.ops import backends
from loco_ext.ops.penalties import LayerPenalty, StepPenalty
from loco_ext.ops.prox_after_step import applied_by_kernels, step_then_prox
from loco_ext.ops.step_args import ADAM, SGD, Flags, StepArgs
from loco_ext.ops.step_checks import check_lengths, check_penalties, check_scalars, check_step
from loco_ext.reference import optim_step as _reference
from loco_ext.reference.dtypes import compute_dtype

_FAMILY = "optim_step"


def optim_step_sgd(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    hyper: Tensor,
    *,
    first: Sequence[int] | None = None,
    group_index: Sequence[int] | None = None,
    lrs: Sequence[Tensor] = (),
    lr_index: Sequence[int] = (),
    maps: Sequence[Tensor] = (),
    map_index: Sequence[int] | None = None,
    penalties: Sequence[StepPenalty | LayerPenalty | None] = (),
    nesterov: bool = False,
    maximize: bool = False,
    l1: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    ordinals: Sequence[int] | None = None,
    seed: int | None = None,
    rounding_step: int = 0,
) -> None:
    """Make an SGD step as torch.optim: ``b = mu*b + (1 - dampening)*d``, ``w -= lr * (d + mu*b if nesterov else b)``.

    ``mu`` is the momentum and ``d`` the gradient with its decay. ``help(loco_ext.ops.optim_step)`` describes the
    arguments that are missing below.

    Args:
        params, grads: the parameters to step and their gradients, of the same shapes.
        momentum_buffers: one per parameter, or empty for SGD without momentum.
        hyper: shape (groups, 4), columns lr, weight_decay, momentum, dampening.
        first: 1 where the buffer is uninitialised and becomes ``d``; default or empty: all 0.
        l1: the decay's gradient is the sign of the weight instead of the weight (LOCO-REG, section 6).

    Example:
        >>> import torch
        >>> from loco_ext import geometry, ops
        >>> w, g = torch.ones(1, 1, 3, 3), torch.zeros(1, 1, 3, 3)
        >>> hyper = torch.tensor([[0.1, 1.0, 0.0, 0.0]], dtype=torch.float64)
        >>> ops.optim_step_sgd([w], [g], [], hyper, maps=[geometry.decay_map((3, 3), (0.5, 2))], map_index=[0])
        >>> round(w.mean().item(), 4)
        0.9
    """
    run_step(
        StepArgs(
            rule=SGD,
            flags=Flags(maximize=maximize, l1=l1, nesterov=nesterov),
            params=list(params),
            grads=list(grads),
            states=[list(momentum_buffers)] if momentum_buffers else [],
            hyper=hyper.contiguous(),
            first=[] if first is None else list(first),
            group_index=[] if group_index is None else list(group_index),
            lrs=list(lrs),
            lr_index=list(lr_index),
            maps=list(maps),
            map_index=[] if map_index is None else list(map_index),
            penalties=list(penalties),
            grad_scale=grad_scale,
            found_inf=found_inf,
            ordinals=list(range(len(params)) if ordinals is None and seed is not None else ordinals or ()),
            seed=seed,
            rounding_step=rounding_step,
        )
    )


def optim_step_adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    hyper: Tensor,
    *,
    group_index: Sequence[int] | None = None,
    lrs: Sequence[Tensor] = (),
    lr_index: Sequence[int] = (),
    maps: Sequence[Tensor] = (),
    map_index: Sequence[int] | None = None,
    penalties: Sequence[StepPenalty | LayerPenalty | None] = (),
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled: bool = False,
    l1: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    ordinals: Sequence[int] | None = None,
    seed: int | None = None,
    rounding_step: int = 0,
) -> None:
    """Make an Adam step as torch.optim; ``decoupled=True``: AdamW, with ``w *= 1 - lr*weight_decay*map`` before it.

    ``help(loco_ext.ops.optim_step)`` describes the arguments that are missing below.

    Args:
        params, grads: the parameters to step and their gradients, of the same shapes.
        exp_avgs, exp_avg_sqs: the moments, one per parameter.
        max_exp_avg_sqs: one per parameter with ``amsgrad``, else empty.
        steps: one-element float32 or float64 tensors, incremented by one.
        hyper: shape (groups, 5), columns lr, weight_decay, beta1, beta2, eps.
        l1: the decay's gradient is the sign of the weight (coupled decay only).

    Example:
        >>> import torch
        >>> from loco_ext import ops
        >>> w, g, m, v, t = torch.ones(2), torch.ones(2), torch.zeros(2), torch.zeros(2), torch.zeros(())
        >>> hyper = torch.tensor([[0.1, 0.0, 0.9, 0.999, 1e-8]], dtype=torch.float64)
        >>> ops.optim_step_adam([w], [g], [m], [v], [], [t], hyper)
        >>> round(w[0].item(), 4), t.item()
        (0.9, 1.0)
    """
    run_step(
        StepArgs(
            rule=ADAM,
            flags=Flags(maximize=maximize, l1=l1, amsgrad=amsgrad, decoupled=decoupled),
            params=list(params),
            grads=list(grads),
            states=[list(tensors) for tensors in (exp_avgs, exp_avg_sqs, *([max_exp_avg_sqs] if amsgrad else []))],
            steps=list(steps),
            hyper=hyper.contiguous(),
            group_index=[] if group_index is None else list(group_index),
            lrs=list(lrs),
            lr_index=list(lr_index),
            maps=list(maps),
            map_index=[] if map_index is None else list(map_index),
            penalties=list(penalties),
            grad_scale=grad_scale,
            found_inf=found_inf,
            ordinals=list(range(len(params)) if ordinals is None and seed is not None else ordinals or ()),
            seed=seed,
            rounding_step=rounding_step,
        )
    )


def run_step(args: StepArgs) -> None:
    """Make the step in the backend that serves the parameters' device."""
    if not args.params:
        return
    chosen = backends.choose(_FAMILY, args.params[0].device)
    if chosen == "reference":
        check_step(args, by_kernels=False)
        _reference.optim_step(args)
        return
    if args.penalties:
        _run_with_penalties(chosen, args)
    else:
        _run_kernels(chosen, args, args)
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(chain.from_iterable(args.written()))


def run_and_cache(chosen: str, args: StepArgs) -> Any:
    """Make a step by kernels like one that :func:`run_step` has made, and return it for :func:`run_again`.

    ``chosen``: the backend, native or triton. Raises RuntimeError, with nothing written, if the library refuses it.
    """
    cached: Any
    if chosen == "triton":
        cached = _triton().optim_step(args)
    else:
        cached = backends.operators().optim_step_cached(*args.for_operator())
    torch.autograd.graph.increment_version(chain.from_iterable(args.written()))
    return cached


def run_again(chosen: str, cached: Any, args: StepArgs, check: bool = False) -> bool:
    """Make a step once more; return False, with nothing written, if the gradients do not fit it.

    Autograd learns that parameters and gradients change, but not that states do, which torch's fused optimizers do not
    tell it either: most of the host's time would go into it.

    Args:
        chosen: the backend that has made the step.
        cached: what :func:`run_and_cache` has returned for it.
        args: parameters, gradients, hyper-parameters and scalars count; the library trusts that parameters, states and
            step counts lie where they did.
        check: return whether the gradients fit, and make no step.

    Raises RuntimeError, with nothing written, if the library refuses it.
    """
    if chosen == "triton":
        fits = _triton().optim_step_again(cached, args, check)
    else:
        scalars = args.lrs, args.lr_index, args.grad_scale, args.found_inf
        fits = backends.operators().optim_step_again(cached, args.grads, args.hyper, *scalars, check)
    if fits and not check:
        torch.autograd.graph.increment_version(
            args.params if args.grad_scale is None else chain(args.params, args.grads)
        )
    return fits


def _triton() -> ModuleType:
    return importlib.import_module("loco_ext.triton_kernels.optim_step")


def _run_with_penalties(chosen: str, args: StepArgs) -> None:
    """Run a step with penalties: compiled kernels end it with the prox of some; that of all others follows it."""
    if isinstance(args.params[0], FakeTensor):  # there are no values to shrink
        _run_kernels(chosen, replace(args, penalties=[]), args)
        return
    native = chosen == "native"
    within = [
        p if native and applied_by_kernels(w, p) else None for w, p in zip(args.params, args.penalties, strict=False)
    ]
    after = [None if inside is not None else p for p, inside in zip(args.penalties, within, strict=False)]
    if not any(penalty is not None for penalty in after) and len(args.penalties) == len(args.params):
        _run_kernels(chosen, args, args)
        return
    check_lengths(args)
    penalised = [i for i, penalty in enumerate(after) if penalty is not None]
    if all(_has_compute_dtype(each[i], args.params[i]) for each in (args.params, *args.states) for i in penalised):
        check_penalties(args)  # kernels check all else
    else:  # kernels will step copies, and check these
        check_step(args)
    found_inf = args.found_inf
    if native and isinstance(found_inf, Tensor) and found_inf.is_cpu:
        check_scalars(args, args.params[0].device)
        if found_inf.item() != 0:
            _run_kernels(chosen, replace(args, penalties=within), args)
            return
    step_then_prox(
        replace(args, penalties=after), lambda wide: _run_kernels(chosen, replace(wide, penalties=within), args)
    )


def _has_compute_dtype(tensor: Tensor, param: Tensor) -> bool:
    """Return whether a parameter or its state has the dtype that the parameter's step computes in."""
    return isinstance(tensor, Tensor) and isinstance(param, Tensor) and tensor.dtype == compute_dtype(param.dtype)


def _run_kernels(chosen: str, args: StepArgs, given: StepArgs) -> None:
    """Run the kernels; ``given``: the arguments as the user gave them, which errors are about."""
    check_lengths(args)
    try:
        if chosen == "triton":
            _triton().optim_step(args)
        else:
            backends.operators().optim_step(*args.for_operator())
    except RuntimeError:
        # The compiled checks refused before anything was written; raise a typed error instead if there is one.
        check_step(given)
        raise
