"""Tests of optimizers over random sequences of what users do between steps.

Our optimizer and torch.optim's for-loop go through the same sequence; after each step parameters and states must agree.
For decay maps and penalties, which torch lacks, the other optimizer is the reference, with its plans rebuilt each step.
"""

import copy
import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import loco_ext
from loco_ext import optim, sparsity
from tests.covering import slow
from tests.optim.stepping import (
    CLASSES,
    LAYOUTS,
    assert_same,
    compare_step,
    nearly,
    params_of,
    through_a_file,
    torch_loop,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [(), (5,), (0, 3), (4, 3), (2, 1, 3, 3), (2, 3, 5), (3, 2, 3, 3)]
CONVOLUTIONS = [(2, 1, 3, 3), (2, 2, 3, 3), (3, 2, 1, 5), (2, 2, 5), (2, 1, 5, 5)]
# Values to choose from for each option; an optimizer ignores the options that it does not have.
OPTIONS = {
    "lr": [0.01, 0.1, torch.tensor(0.05, dtype=torch.float64), torch.tensor([0.02], dtype=torch.float64)],
    "weight_decay": [0.0, 0.01, 0.3],
    "maximize": [False, True],
    "momentum": [0.0, 0.5, 0.9],
    "dampening": [0.0, 0.3],
    "nesterov": [False, True],
    "betas": [(0.9, 0.999), (0.5, 0.9), (0.0, 0.5)],
    "eps": [1e-8, 1e-3],
    "amsgrad": [False, True],
}
IMPLEMENTATIONS = [{}, {"foreach": True}, {"differentiable": True}, {"fused": False}]
OURS = [
    {"locality": (0.5, 2.0)},
    {"locality": (0.1, 3.0)},
    {"penalty": sparsity.RingPenalty(0.02)},
    {"penalty": None, "locality": None},
]


def alike(a, b):
    """Return whether two states are equal: nearly, for tensors of float64, and exactly for anything else."""
    return nearly(a, b) if torch.is_tensor(a) else a == b


class Life:
    """Two optimizers of one class that both go through the same random sequence of actions."""

    def __init__(self, name, seed, by_kernel=False):
        self.random, self.by_kernel = random.Random(seed), by_kernel
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = torch.float64 if by_kernel else self.random.choice([torch.float32, torch.float64])
        self.done = [f"{name}, seed {seed}, {self.dtype}"]
        values = [self.normal(shape) for shape in SHAPES]
        half = self.random.randrange(1, len(values))
        self.ours, self.theirs = (self.make(name, values, half, ours) for ours in (True, False))

    def make(self, name, values, half, ours):
        params = [nn.Parameter(value.clone()) for value in values]
        groups = [{"params": params[:half]}, {"params": params[half:], "weight_decay": 0.1}]
        options = {"lr": 0.01} | ({"momentum": 0.9} if name == "SGD" else {"eps": 1e-3})
        if ours or self.by_kernel:
            return getattr(optim, name)(groups, **options, fused=None if ours else False)
        return torch_loop(name, groups, **options)

    def both(self):
        return self.ours, self.theirs

    def normal(self, shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def pick(self):
        """Return a random parameter of our optimizer and the corresponding one of the other."""
        index = self.random.randrange(len(params_of(self.ours)))
        return tuple(params_of(optimizer)[index] for optimizer in self.both())

    def live(self, actions):
        for _ in range(actions):
            action = self.random.choice(ACTIONS)
            self.done.append(action.__name__)
            try:
                action(self)
            except Exception as error:
                error.add_note("; ".join(self.done))
                raise

    def set_gradients(self, scale=1.0):
        layout = self.random.choice([*LAYOUTS, "expanded", "negative", "shared", "mixed"])
        absent = self.random.choice([0.0, 0.0, 0.3, 1.0])
        made = {}
        for p, q in zip(*map(params_of, self.both()), strict=True):
            grad = self.normal(p.shape) * scale
            kind = self.random.choice(list(LAYOUTS)) if layout == "mixed" else layout
            if kind in LAYOUTS:
                grad = LAYOUTS[kind](grad)
            elif kind == "expanded":
                grad = grad.flatten()[:1].sum().expand(p.shape)
            elif kind == "negative":
                grad = torch._neg_view(grad)
            else:
                grad = made.setdefault(p.shape, grad)
            p.grad, q.grad = (None, None) if self.random.random() < absent else (grad, grad.clone())

    def step(self, step=None):
        """Step both optimizers, by ``step(optimizer)`` if it is given, and compare them."""
        complete_amsgrad(self)
        for group, other in zip(self.ours.param_groups, self.theirs.param_groups, strict=True):
            if group["foreach"] and group.get("nesterov"):  # torch writes to gradients then, and twice to shared ones
                group["nesterov"] = other["nesterov"] = False
        before = [p.detach().clone() for p in params_of(self.ours)]
        states = [copy.deepcopy(self.theirs.state.get(q, {})) for q in params_of(self.theirs)]
        if self.by_kernel:
            self.theirs._plans = []
        for optimizer in self.both():
            optimizer.step() if step is None else step(optimizer)
        if self.by_kernel:
            assert_same(self.ours, self.theirs, alike)
        compare_step(self.ours, self.theirs, before, states, ulps=None)


# ---- actions


def step(life):
    life.set_gradients()
    life.step()


def step_with_the_same_gradients(life):
    life.step()


def step_with_closure(life):
    life.set_gradients()

    def by_closure(optimizer):
        calls = []

        def closure():
            calls.append(torch.is_grad_enabled())
            return 3.5

        assert optimizer.step(closure) == 3.5
        assert calls == [True]

    life.step(by_closure)


def step_by_scaler(life):
    scale = life.random.choice([2.0**-3, 2.0**10])
    life.set_gradients(scale)
    grads = [p.grad for p in params_of(life.ours) if p.grad is not None and p.grad.numel()]
    if not grads or any(p.grad is not None and 0 in p.grad.stride() for p in params_of(life.ours)):
        return  # expanded gradients cannot be unscaled in place
    for p in params_of(life.ours):  # shared gradients would be unscaled twice
        p.grad = None if p.grad is None else p.grad.clone()
    overflow, unscale = life.random.random() < 0.3, life.random.random() < 0.3
    if overflow:
        for p, q in zip(*map(params_of, life.both()), strict=True):
            if p.grad is not None:
                p.grad.fill_(torch.inf), q.grad.fill_(torch.inf)

    def by_scaler(optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(torch.ones(()))
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    life.step(by_scaler)
    if overflow:
        clear_gradients(life)


def step_by_reference(life):
    life.set_gradients()

    def by_reference(optimizer):
        with loco_ext.backend("reference"):
            optimizer.step()

    life.step(by_reference)


def step_with_hooks(life):
    life.set_gradients()

    @torch.no_grad()
    def double(optimizer, *_):
        for p in params_of(optimizer):
            p.grad = None if p.grad is None else 2 * p.grad

    def hooked(optimizer):
        handles = [optimizer.register_step_pre_hook(double), optimizer.register_step_post_hook(double)]
        optimizer.step()
        for handle in handles:
            handle.remove()

    life.step(hooked)


def step_under_another_default(life):
    """Step only ours under another default device or mode: torch's functions create states and step counts there."""
    life.set_gradients()
    context = life.random.choice([lambda: torch.device("meta"), torch.inference_mode, torch.enable_grad])
    if any(group["foreach"] or group["differentiable"] for group in life.ours.param_groups):
        context = nullcontext

    def under(optimizer):
        with context() if optimizer is life.ours else nullcontext():
            optimizer.step()

    life.step(under)


def clear_gradients(life):
    to_none = life.random.choice([True, False])
    for optimizer in life.both():
        for p in params_of(optimizer):
            if p.grad is not None and (0 in p.grad.stride() or p.grad.is_neg()):
                p.grad = p.grad.clone()
        optimizer.zero_grad(set_to_none=to_none)


def freeze(life):
    for p in life.pick():
        p.requires_grad_(not p.requires_grad)


def replace_data(life):
    layout = life.random.choice(list(LAYOUTS))
    for p in life.pick():
        p.data = LAYOUTS[layout](p.detach())


def change_kernel_size(life):
    shape = life.random.choice(CONVOLUTIONS)
    value = life.normal(shape)
    for optimizer, p in zip(life.both(), life.pick(), strict=True):
        p.grad = None
        p.data = value.to(p.dtype, copy=True)
        optimizer.state.pop(p, None)


def change_dtype(life):
    dtype = torch.float64 if life.by_kernel else life.random.choice([torch.float32, torch.float64])
    for optimizer in life.both():
        for p in params_of(optimizer):
            p.grad, p.data = None, p.data.to(dtype)
            for key, value in optimizer.state.get(p, {}).items():
                if torch.is_tensor(value) and key != "step":
                    optimizer.state[p][key] = value.to(dtype)
    life.dtype = dtype


def swap_tensors(life):
    layout = life.random.choice(list(LAYOUTS))
    for p in life.pick():
        p.grad = None
        torch.utils.swap_tensors(p, nn.Parameter(LAYOUTS[layout](p.detach())))


def replace_parameter(life):
    value = life.normal(life.random.choice(SHAPES))
    group = life.random.randrange(len(life.ours.param_groups))
    for optimizer in life.both():
        params = optimizer.param_groups[group]["params"]
        if params:
            optimizer.state.pop(params[0], None)
            params[0] = nn.Parameter(value.clone())


def add_group(life):
    value = life.normal(life.random.choice(CONVOLUTIONS))
    for optimizer in life.both():
        if len(optimizer.param_groups) < 4:
            optimizer.add_param_group({"params": [nn.Parameter(value.clone())], "weight_decay": 0.2})


def set_options(life):
    group = life.random.choice([None, *range(len(life.ours.param_groups))])
    known = [key for key in OPTIONS if key in life.ours.param_groups[0]]
    changes = {key: life.random.choice(OPTIONS[key]) for key in life.random.sample(known, 2)}
    if any(group["foreach"] for group in life.ours.param_groups):
        changes.pop("lr", None)  # torch's foreach Adam accepts no tensor
    for optimizer in life.both():
        for chosen in optimizer.param_groups if group is None else [optimizer.param_groups[group]]:
            chosen.update(copy.deepcopy(changes))


def complete_amsgrad(life):
    """Add the maximum's state where amsgrad was switched on late: torch expects the state to exist."""
    for optimizer in life.both():
        for group in optimizer.param_groups:
            for p in group["params"] if group.get("amsgrad") else []:
                if optimizer.state.get(p) and "max_exp_avg_sq" not in optimizer.state[p]:
                    optimizer.state[p]["max_exp_avg_sq"] = torch.zeros_like(p.detach())


def set_implementation(life):
    changes = life.random.choice(IMPLEMENTATIONS)
    if any(torch.is_tensor(group["lr"]) or life.by_kernel for group in life.ours.param_groups):
        return  # torch's foreach refuses such a learning rate
    for group in life.ours.param_groups:
        group.update({"foreach": None, "differentiable": False, "fused": None, **changes})
    for group in life.theirs.param_groups:  # torch's differentiable functions round differently
        group["differentiable"] = bool(changes.get("differentiable"))


def set_ours(life):
    if life.by_kernel:
        changes = life.random.choice(OURS)
        for optimizer in life.both():
            group = optimizer.param_groups[-1]
            if "penalty" not in changes or any(3 <= p.dim() <= 5 for p in group["params"]):
                group.update(changes)


def replace_states(life):
    layout = life.random.choice(list(LAYOUTS))
    for optimizer, p in zip(life.both(), life.pick(), strict=True):
        for key, value in optimizer.state.get(p, {}).items():
            if torch.is_tensor(value):
                optimizer.state[p][key] = LAYOUTS[layout](value)


def forget_a_state(life):
    kind = life.random.choice(["pop", "clear"])
    for optimizer, p in zip(life.both(), life.pick(), strict=True):
        if kind == "pop":
            optimizer.state.pop(p, None)
        elif p in optimizer.state:
            optimizer.state[p].clear()


def reload_from_file(life):
    for optimizer in life.both():
        optimizer.load_state_dict(through_a_file(optimizer.state_dict()))


def exchange_checkpoints(life):
    mine, other = life.ours.state_dict(), life.theirs.state_dict()
    life.ours.load_state_dict(copy.deepcopy(other))
    life.theirs.load_state_dict(copy.deepcopy(mine))
    if life.by_kernel:
        for group in life.ours.param_groups:
            group["fused"] = None
    for group in life.theirs.param_groups:
        group.update({"fused": False} if life.by_kernel else {"foreach": False, "fused": False})


def copy_optimizers(life):
    life.ours, life.theirs = map(copy.deepcopy, life.both())


ACTIONS = [
    *[step] * 4,
    *(step_with_the_same_gradients, step_with_closure, step_by_scaler, step_by_reference, step_with_hooks),
    *(step_under_another_default, clear_gradients, freeze, replace_data, change_kernel_size, change_dtype),
    *(swap_tensors, replace_parameter, add_group, set_options, set_implementation, set_ours, replace_states),
    *(forget_a_state, reload_from_file, exchange_checkpoints, copy_optimizers),
]


@pytest.mark.parametrize(
    "seeds", [[1, 2, 3, 4, 5, 16], [6, 7, 8, 9, 32, 48], slow(range(100, 300))], ids=["some", "others", "many"]
)
def test_random_sequences_of_actions_follow_torch(seeds):
    for seed in seeds:
        Life(CLASSES[seed % 3], seed, by_kernel=seed % 16 == 0).live(25)
