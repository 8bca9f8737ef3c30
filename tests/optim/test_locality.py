"""Tests of the optimizers' decay map: closed forms in float64, which parameters get a map, and torch's own paths."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from loco_ext import optim
from tests.covering import covering
from tests.optim.stepping import (
    CLASSES,
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

pytestmark = pytest.mark.usefixtures("native")

KERNELS = [(3, 3), (5, 5), (7,), (3, 3, 3), (1, 7), (3, 5)]
LOCALITY = (0.5, 2.0)


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


@pytest.mark.parametrize(
    ("name", "factors", "kernel", "dtype"),
    covering(["SGD", "AdamW"], ["pair", "per class"], KERNELS, [torch.float32, torch.float64]),
    ids=str,
)
def test_without_gradients_weights_shrink_by_the_map_alone(name, factors, kernel, dtype):
    factors = LOCALITY if factors == "pair" else per_class(kernel)
    params = make_params([(3, 2, *kernel), (1, 1, *kernel)], dtype)
    start = [p.detach().clone().double() for p in params]
    lr, decay, steps = 0.1, 0.4, 5
    optimizer = getattr(optim, name)(params, lr=lr, weight_decay=decay, locality=factors)
    for _ in range(steps):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    for p, w in zip(params, start, strict=True):
        assert_close(p, w * (1 - lr * decay * map_by_hand(kernel, factors)) ** steps, steps)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_l1_decay_moves_every_weight_towards_zero_by_the_map(kernel):
    w = torch.randn(3, 2, *kernel, dtype=torch.float64)
    w += w.sign()  # so that no weight crosses zero
    w[0, 0] = 0
    param = nn.Parameter(w.clone())
    optimizer = optim.SGD([param], lr=0.1, weight_decay=0.2, locality=LOCALITY, norm="l1")
    for _ in range(5):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    assert_close(param, w - 5 * 0.1 * 0.2 * map_by_hand(kernel, LOCALITY) * w.sign(), 5)


@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("foreach", [None, True], ids=["fused", "foreach"])
@pytest.mark.parametrize("name", CLASSES)
def test_with_gradients_it_is_torchs_step_with_the_map_put_in_by_hand(name, foreach, maximize, norm):
    if (name, norm) == ("AdamW", "l1"):
        pytest.skip("decoupled decay has no l1")
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


@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("name", CLASSES)
def test_differentiable_steps_carry_gradients_through_the_map(name, norm):
    if (name, norm) == ("AdamW", "l1"):
        pytest.skip("decoupled decay has no l1")
    # There is no momentum, because torch detaches its first gradient.
    options = {"lr": 0.1, "differentiable": True, **({} if name == "SGD" else {"eps": 0.1})}
    own = {"weight_decay": 0.3, "locality": LOCALITY, "norm": norm}
    start = torch.randn(2, 1, 3, 3, dtype=torch.float64)
    grads = torch.randn(2, 2, 1, 3, 3, dtype=torch.float64)

    def two_steps(start, grads):
        p = start.clone()
        optimizer = getattr(optim, name)([p], **options, **own)
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
    assert_close(two_steps(start, grads), plain, 2)
    assert torch.autograd.gradcheck(two_steps, (start.requires_grad_(), grads.requires_grad_()))


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("path", ["foreach", "differentiable"])
def test_torchs_own_paths_are_torchs_to_the_bit_without_locality(name, path):
    options = {**RICH[name], path: True}
    params = [p.requires_grad_(path == "foreach") for p in make_params()]
    theirs = getattr(torch.optim, name)([p.detach().clone().requires_grad_(p.requires_grad) for p in params], **options)
    ours = getattr(optim, name)(params, **options)
    for opt in (ours, theirs):
        train(opt, 3)
    assert_same(ours, theirs, same_bits)


def test_groups_may_mix_our_kernels_and_torchs_paths():
    groups = [make_params([(2, 2, 3, 3)], seed=seed) for seed in range(3)]
    alone = [
        optim.SGD(clones(group), **RICH["SGD"], foreach=foreach)
        for group, foreach in zip(groups, (None, True, None), strict=True)
    ]
    mixed = optim.SGD(
        [{"params": g, "foreach": f} for g, f in zip(groups, (None, True, None), strict=True)], **RICH["SGD"]
    )
    for step in range(3):
        for opt in alone:
            set_gradients(params_of(opt), step)
            opt.step()
        for i in range(3):
            set_gradients(groups[i], step)
        mixed.step()
    for group, opt in zip(groups, alone, strict=True):
        assert same_bits(group[0].detach(), params_of(opt)[0].detach())


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("ones", [(1, 1), (1.0, 1.0), (1.0, 1.0, 1.0), [(1, 1), None]], ids=str)
def test_factors_of_one_are_plain_decay_to_the_bit(name, ones):
    params = make_params([(3, 2, 3, 3), (1, 5, 3, 3)])
    plain = getattr(optim, name)(clones(params), **RICH[name])
    ours = getattr(optim, name)(params, **RICH[name], locality=ones)
    train(ours, 4)
    train(plain, 4)
    assert_same(ours, plain, same_bits)


@pytest.mark.parametrize(
    "shape", [(1, 197, 768), (8, 3, 1, 1), (4, 9), (3, 3), (9,), (2, 1, 17, 17), (1, 2, 2, 3, 3, 3)], ids=str
)
def test_in_a_bare_list_only_what_looks_like_a_kernel_gets_a_map(shape):
    params = make_params([shape, (2, 2, 3, 3)])
    plain = optim.SGD(clones(params), lr=0.1, weight_decay=0.5)
    ours = optim.SGD(params, lr=0.1, weight_decay=0.5, locality=LOCALITY)
    train(ours, 2)
    train(plain, 2)
    mine, other = params_of(ours), params_of(plain)
    assert same_bits(mine[0].detach(), other[0].detach())
    assert not torch.equal(mine[1], other[1])


def test_a_list_gives_every_parameter_its_own_factors():
    params = make_params([(2, 2, 3, 3), (2, 2, 3, 3), (2, 2, 5, 5), (4, 4, 1, 1), (7,), (1, 1, 17)], torch.float64)
    start = [p.detach().clone() for p in params]
    factors = [(0.5, 2.0), (2.0, 0.5, 1.0), None, (0.3, 3.0), None, (0.1, 4.0)]
    optimizer = optim.SGD(params, lr=0.1, weight_decay=0.5, locality=factors)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, w, each in zip(params, start, factors, strict=True):
        kernel = tuple(w.shape[2:])
        decay = 1.0 if each is None or math.prod(kernel) == 1 else map_by_hand(kernel, each)
        assert_close(p, w * (1 - 0.1 * 0.5 * decay), 1)


def test_each_group_has_its_own_locality():
    groups = [
        {"params": make_params([(2, 2, 3, 3)], torch.float64, seed), "locality": f}
        for seed, f in enumerate([LOCALITY, None, (3.0, 0.25)])
    ]
    start = [group["params"][0].detach().clone() for group in groups]
    optimizer = optim.SGD(groups, lr=0.1, weight_decay=0.5)
    for p in params_of(optimizer):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, w, f in zip(params_of(optimizer), start, (LOCALITY, (1.0, 1.0), (3.0, 0.25)), strict=True):
        assert_close(p, w * (1 - 0.1 * 0.5 * map_by_hand((3, 3), f)), 1)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_locality_changed_between_steps_takes_effect(name):
    params = make_params([(3, 2, 3, 3)], torch.float64)
    w = params[0].detach().clone()
    optimizer = getattr(optim, name)(params, lr=0.1, weight_decay=0.5, locality=[None])
    group = optimizer.param_groups[0]

    def change_in_place():
        group["locality"][0] = (0.0, 3.0)

    changes = [
        (lambda: None, (1.0, 1.0)),
        (change_in_place, (0.0, 3.0)),
        (lambda: group.update(locality=LOCALITY), LOCALITY),
        (lambda: group.update(locality=(2.0, 1.0, 0.5)), (2.0, 1.0, 0.5)),
        (lambda: group.update(locality=None), (1.0, 1.0)),
    ]
    for count, (change, factors) in enumerate(changes, 1):
        change()
        params[0].grad = torch.zeros_like(params[0])
        optimizer.step()
        w = w * (1 - 0.1 * 0.5 * map_by_hand((3, 3), factors))
        assert_close(params[0], w, count)


@pytest.mark.parametrize("kernel", [(4, 4), (2,), (3, 4), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("as_list", [False, True])
def test_even_kernels_stay_uniform_and_say_so_once(kernel, as_list):
    params = make_params([(2, 2, *kernel), (3, 1, *kernel)])
    plain = optim.SGD(clones(params), lr=0.1, weight_decay=0.5)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ours = optim.SGD(params, lr=0.1, weight_decay=0.5, locality=[LOCALITY] * 2 if as_list else LOCALITY)
        train(ours, 3)
    train(plain, 3)
    assert_same(ours, plain, same_bits)
    assert len(seen) == 1
    assert "uniform" in str(seen[0].message)


BAD_LOCALITIES = [
    (0.5, TypeError),
    ("ab", TypeError),
    (("a", "b"), TypeError),
    ((1j, 1.0), TypeError),
    ({0.5, 2.0}, TypeError),
    (torch.ones(2), TypeError),
    ([0.5, None], TypeError),
    ((), ValueError),
    ((0.5,), ValueError),
    ((0.5, 1.0, 2.0, 3.0), ValueError),
    ((-0.5, 2.0), ValueError),
    ((math.nan, 2.0), ValueError),
    ((math.inf, 2.0), ValueError),
    ((0.0, 0.0, 0.0), ValueError),
    ([], ValueError),
    ([LOCALITY], ValueError),
    ([LOCALITY] * 3, ValueError),
    ([None, LOCALITY], ValueError),
]


@pytest.mark.parametrize(("locality", "error"), BAD_LOCALITIES, ids=repr)
@pytest.mark.parametrize("name", CLASSES)
def test_a_bad_locality_is_a_typed_error_when_a_group_is_made_and_before_a_step(name, locality, error):
    params = make_params([(2, 2, 3, 3), (4, 4)])
    if isinstance(locality, list):
        assert locality != [LOCALITY, None]
    with pytest.raises(error, match=r"^(locality|factors).*expected.*got"):
        getattr(optim, name)(params, locality=locality)

    optimizer = getattr(optim, name)(make_params([(3,)]))
    with pytest.raises(error, match="expected"):
        optimizer.add_param_group({"params": params, "locality": locality})
    assert len(optimizer.param_groups) == 1

    optimizer = getattr(optim, name)(params)
    optimizer.param_groups[0]["locality"] = locality
    set_gradients(params, 0)
    before = clones(params)
    with pytest.raises(error, match="expected"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"norm": "l3"}, ValueError),
        ({"norm": None}, ValueError),
        ({"state_dtype": torch.float16}, ValueError),
        ({"state_dtype": "float32"}, ValueError),
        ({"stochastic_rounding": True}, TypeError),
        ({"stochastic_rounding": 0.5}, TypeError),
        ({"stochastic_rounding": 3, "foreach": True}, ValueError),
        ({"state_dtype": torch.float32, "differentiable": True}, ValueError),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CLASSES)
def test_other_bad_options_name_themselves(name, options, error):
    with pytest.raises(error, match=f"{next(iter(options))}.*expected"):
        getattr(optim, name)(make_params(), **options)
    optimizer = getattr(optim, name)(make_params([(2,)]))
    with pytest.raises(error):
        optimizer.add_param_group({"params": make_params(), **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "make", [lambda p: optim.AdamW(p, norm="l1"), lambda p: optim.Adam(p, norm="l1", decoupled_weight_decay=True)]
)
def test_l1_needs_coupled_decay(make):
    with pytest.raises(ValueError, match="norm: expected 'l2'"):
        make(make_params())
