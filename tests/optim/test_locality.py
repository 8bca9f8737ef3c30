"""Tests of the optimizers' decay map: closed forms in float64, which parameters get a map, and torch's own paths."""

import math
import warnings

import numpy as np
import pytest
import torch

from loco_ext import optim
from tests.covering import covering
from tests.optim.stepping import (
    CLASSES,
    LOCALITY,
    RICH,
    assert_same,
    clones,
    make_params,
    params_of,
    set_gradients,
    torch_loop,
    train,
)
from tests.tolerances import ULPS, assert_within_ulps, same_bits

KERNELS = [(3, 3), (5, 5), (7,), (3, 3, 3), (1, 7), (3, 5)]
# The decoupled decay of AdamW has no l1.
NORMS = [("SGD", "l2"), ("Adam", "l2"), ("AdamW", "l2"), ("SGD", "l1"), ("Adam", "l1")]


def map_by_hand(kernel, factors):
    """Return the relative decay of each tap: factors by distance from the centre, divided by their mean."""
    centre = [(n - 1) / 2 for n in kernel]
    squares = sum((index - c) ** 2 for index, c in zip(np.indices(kernel), centre, strict=True))
    if len(factors) == 2:
        g = np.where(squares == 0, factors[0], np.where(squares <= 1, 1.0, factors[1]))
    else:
        g = np.array(factors)[np.searchsorted(np.unique(squares), squares)]
    return torch.from_numpy(np.asarray(g / g.mean()))


def per_class(kernel):
    count = len({sum((2 * i - n + 1) ** 2 for i, n in zip(tap, kernel, strict=True)) for tap in np.ndindex(kernel)})
    return tuple(0.25 + 0.5 * i for i in range(count))


def decayed_by_hand(theirs, factors, weight_decay, l1=False):
    """Apply the decay to torch's gradients (coupled) or weights (AdamW); torch's own weight_decay is 0."""
    lr = theirs.param_groups[0]["lr"]
    with torch.no_grad():
        for p in params_of(theirs):
            decay = weight_decay * map_by_hand(tuple(p.shape[2:]), factors)
            if isinstance(theirs, torch.optim.AdamW):
                p.mul_((1 - lr * decay).to(p.dtype))
            else:
                p.grad = p.grad + decay.to(p.dtype) * (p.sign() if l1 else p)


def assert_close(actual, expected, steps):
    assert_within_ulps(actual.detach(), expected, steps * ULPS[actual.dtype], expected.abs().max().item())


def step_without_gradients(optimizer):
    for p in params_of(optimizer):
        p.grad = torch.zeros_like(p)
    optimizer.step()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("native", "rule", "factors", "kernel", "dtype"),
    covering(
        ["cpu", "cuda_on_cpu"],
        [("SGD", "l2"), ("SGD", "l1"), ("AdamW", "l2")],
        ["pair", "per class"],
        KERNELS,
        [torch.float32, torch.float64],
    ),
    ids=str,
    indirect=["native"],
)
def test_without_gradients_weights_shrink_by_the_map_alone(rule, factors, kernel, dtype):
    name, norm = rule
    factors = LOCALITY if factors == "pair" else per_class(kernel)
    params = make_params([(3, 2, *kernel), (1, 1, *kernel)], dtype)
    with torch.no_grad():
        for p in params:
            p += 5 * p.sign()  # so that no weight crosses zero
        params[0][0, 0] = 0
    start = [p.detach().clone().double() for p in params]
    lr, decay, steps = 0.1, 0.4, 5
    optimizer = getattr(optim, name)(params, lr=lr, weight_decay=decay, locality=factors, norm=norm)
    for _ in range(steps):
        step_without_gradients(optimizer)
    decay_map = map_by_hand(kernel, factors)
    for p, w in zip(params, start, strict=True):
        l1 = w - steps * lr * decay * decay_map * w.sign()
        assert_close(p, l1 if norm == "l1" else w * (1 - lr * decay * decay_map) ** steps, steps)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("foreach", [None, True], ids=["fused", "foreach"])
@pytest.mark.parametrize(("name", "norm"), NORMS)
def test_with_gradients_it_is_torchs_step_with_the_map_put_in_by_hand(name, norm, foreach, maximize):
    options = {**RICH[name], "weight_decay": 0, "lr": 0.05}
    params = make_params([(3, 2, 5, 5), (4, 1, 3, 3)], torch.float64)
    theirs = torch_loop(name, clones(params), **options)
    options.update(weight_decay=0.3, locality=LOCALITY, norm=norm, foreach=foreach, maximize=maximize)
    ours = getattr(optim, name)(params, **options)
    for step in range(4):
        for opt in (ours, theirs):
            set_gradients(params_of(opt), step)
        if maximize:
            for p in params_of(theirs):
                p.grad.neg_()
        decayed_by_hand(theirs, LOCALITY, 0.3, norm == "l1")
        ours.step()
        theirs.step()
    for p, q in zip(params, params_of(theirs), strict=True):
        assert_close(p, q.detach(), 4)


@pytest.mark.parametrize(("name", "norm"), NORMS)
def test_differentiable_steps_carry_gradients_through_the_map(name, norm):
    # There is no momentum, because torch detaches its first gradient.
    options = {"lr": 0.1, "differentiable": True, **({} if name == "SGD" else {"eps": 0.1})}
    own = {"locality": LOCALITY, "norm": norm}
    start = torch.randn(1, 1, 3, 3, dtype=torch.float64)
    grads = torch.randn(2, 1, 1, 3, 3, dtype=torch.float64)
    decay = torch.tensor(0.3, dtype=torch.float64)

    def two_steps(start, grads, decay):
        p = start.clone()
        optimizer = getattr(optim, name)([p], **options, **own, weight_decay=decay)
        for grad in grads:
            p.grad = grad.clone()
            optimizer.step()
        return p

    plain = start.clone()
    theirs = getattr(torch.optim, name)([plain], **options, weight_decay=0)
    for grad in grads:
        plain.grad = grad.clone()
        decayed_by_hand(theirs, LOCALITY, 0.3, norm == "l1")
        theirs.step()
    assert_close(two_steps(start, grads, decay), plain, 2)
    assert torch.autograd.gradcheck(two_steps, (start.requires_grad_(), grads.requires_grad_(), decay.requires_grad_()))


def test_groups_may_mix_our_kernels_and_torchs_paths():
    paths = (None, True, None)
    groups = [{"params": make_params([(2, 2, 3, 3)], seed=i), "foreach": path} for i, path in enumerate(paths)]
    alone = [optim.SGD([{**group, "params": clones(group["params"])}], **RICH["SGD"]) for group in groups]
    mixed = optim.SGD(groups, **RICH["SGD"])
    for step in range(3):
        for group, optimizer in zip(groups, alone, strict=True):
            set_gradients(group["params"], step)
            train(optimizer, 1, start=step)
        mixed.step()
    assert all(map(same_bits, params_of(mixed), [p for optimizer in alone for p in params_of(optimizer)]))


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("ones", [(1, 1), (1.0, 1.0, 1.0), [(1, 1), None]], ids=str)
def test_factors_of_one_are_plain_decay_to_the_bit(name, ones):
    params = make_params([(3, 2, 3, 3), (1, 5, 3, 3)])
    plain = getattr(optim, name)(clones(params), **RICH[name])
    ours = getattr(optim, name)(params, **RICH[name], locality=ones)
    for each in (ours, plain):
        train(each, 4)
    assert_same(ours, plain, same_bits)


def test_in_a_bare_list_only_what_looks_like_a_kernel_gets_a_map():
    others = [(1, 197, 768), (8, 3, 1, 1), (4, 9), (3, 3), (9,), (2, 1, 17, 17), (1, 2, 2, 3, 3, 3)]
    params = make_params([*others, (2, 2, 3, 3)])
    plain = optim.SGD(clones(params), lr=0.1, weight_decay=0.5)
    ours = optim.SGD(params, lr=0.1, weight_decay=0.5, locality=LOCALITY)
    for each in (ours, plain):
        train(each, 2)
    same = [same_bits(p.detach(), q.detach()) for p, q in zip(params, params_of(plain), strict=True)]
    assert same == [True] * len(others) + [False]


def test_a_list_gives_every_parameter_and_a_group_its_own_factors():
    shapes = [(2, 2, 3, 3), (2, 2, 3, 3), (2, 2, 5, 5), (4, 4, 1, 1), (7,), (1, 1, 17), (2, 2, 3, 3)]
    params = make_params(shapes, torch.float64)
    start = [p.detach().clone() for p in params]
    factors = [(0.5, 2.0), (2.0, 0.5, 1.0), None, (0.3, 3.0), None, (0.1, 4.0), (3.0, 0.25)]
    groups = [{"params": params[:-1], "locality": factors[:-1]}, {"params": params[-1:], "locality": factors[-1]}]
    step_without_gradients(optim.SGD(groups, lr=0.1, weight_decay=0.5))
    for p, w, each in zip(params, start, factors, strict=True):
        kernel = tuple(w.shape[2:])
        decay = 1.0 if each is None or math.prod(kernel) == 1 else map_by_hand(kernel, each)
        assert_close(p, w * (1 - 0.1 * 0.5 * decay), 1)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_locality_changed_between_steps_takes_effect(name):
    params = make_params([(3, 2, 3, 3)], torch.float64)
    w = params[0].detach().clone()
    optimizer = getattr(optim, name)(params, lr=0.1, weight_decay=0.5, locality=[None])
    group = optimizer.param_groups[0]
    for count, locality in enumerate([[None], [(0.0, 3.0)], LOCALITY, (2.0, 1.0, 0.5), None], 1):
        if isinstance(locality, list):
            group["locality"][:] = locality
        else:
            group["locality"] = locality
        step_without_gradients(optimizer)
        factors = locality[0] if isinstance(locality, list) else locality
        w = w * (1 - 0.1 * 0.5 * map_by_hand((3, 3), factors or (1.0, 1.0)))
        assert_close(params[0], w, count)


@pytest.mark.parametrize("as_list", [False, True])
def test_even_kernels_stay_uniform_and_say_so_once(as_list):
    params = make_params([(2, 2, *kernel) for kernel in ((4, 4), (2,), (3, 4), (2, 2, 2))])
    plain = optim.SGD(clones(params), lr=0.1, weight_decay=0.5)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ours = optim.SGD(params, lr=0.1, weight_decay=0.5, locality=[LOCALITY] * 4 if as_list else LOCALITY)
        train(ours, 3)
    train(plain, 3)
    assert_same(ours, plain, same_bits)
    assert len(seen) == 1
    assert "uniform" in str(seen[0].message)
