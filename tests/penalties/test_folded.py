"""Penalties on kernels with the following batch norm folded into them: values, steps, minima."""

import copy
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import loco_ext
from loco_ext import geometry, optim, sparsity
from loco_ext.optim.base import LocalityOptimizer
from tests.covering import covering, slow
from tests.optim.stepping import CLASSES, set_gradients, through_a_file, train
from tests.penalties.cases import make_norm
from tests.tolerances import STATIONARY, same_bits

RINGS, KERNELS = sparsity.RingPenalty(0.12), sparsity.KernelPenalty(0.3)
INNER = {
    "rings": RINGS,
    "full rings": sparsity.RingPenalty(0.3, kind="full", weighting="normalized"),
    "largest": sparsity.KernelPenalty(0.1, norm="linf"),
    "largest in rings": sparsity.RingPenalty(0.05, norm="linf"),
    "squared rings": sparsity.RingPenalty(0.05, power=2),
    "kernels": KERNELS,
    "squared": sparsity.KernelPenalty(0.05, power=2),
}
CASES = {
    "SGD": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "dampening": ("SGD", {"lr": 0.1, "momentum": 0.8, "dampening": 0.5}),
    "Adam": ("Adam", {"lr": 0.02}),
    "amsgrad": ("Adam", {"lr": 0.02, "amsgrad": True}),
    "AdamW": ("AdamW", {"lr": 0.02, "weight_decay": 0.0}),
}


def make_layers(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Conv2d(2, 6, 3, bias=False).to(dtype), make_norm(6).to(dtype)


def make_optimizer(name, conv, norm, inner=RINGS, **options):
    penalty = [sparsity.FoldedPenalty(inner, norm)]
    groups = [{"params": [conv.weight], "penalty": penalty}, {"params": list(norm.parameters())}]
    return getattr(optim, name)(groups, **{"lr": 0.1, **options})


def columns(factors):
    return factors.view(-1, 1, 1, 1)


def folded(conv, norm):
    return (conv.weight * columns(norm.weight / (norm.running_var + norm.eps).sqrt())).detach()


# ---- the minimum of loss and penalty


class Problem:
    """Regression on a teacher with small outer weights; inputs are exactly white and give one output pixel each."""

    def __init__(self, samples=600, channels=3):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(samples, channels * 9, generator=generator, dtype=torch.float64)
        u, _, v = torch.linalg.svd(x - x.mean(0), full_matrices=False)
        self.x = (u @ v * samples**0.5).view(samples, channels, 3, 3)
        decay = torch.tensor([0.02, 0.3, 1.0], dtype=torch.float64)[geometry.ring_index((3, 3))]
        teacher = torch.randn(5, channels, 3, 3, generator=generator, dtype=torch.float64) * decay
        norms = torch.tensor([1.0, 1.0, 0.8, 0.5, 0.1], dtype=torch.float64)
        self.teacher = teacher * columns(norms / teacher.flatten(1).norm(dim=1))
        self.y = nn.functional.conv2d(self.x, self.teacher)

    def student(self):
        torch.manual_seed(1)
        conv, norm = nn.Conv2d(3, 5, 3, bias=False).double(), nn.BatchNorm2d(5).double()
        conv.weight.data += 0.3 * self.teacher
        norm.weight.data[1] = -0.2  # the teacher's sign is reached through zero, or with the opposite kernel
        conv.weight.data[1] *= -1
        return conv, norm

    def loss(self, conv, norm):
        return (norm(conv(self.x)) - self.y).square().sum(1).mean() / 2

    def train(self, conv, norm, optimizer, steps):
        rates = [group["lr"] for group in optimizer.param_groups]
        for step in range(steps):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * min(1.0, 30 ** (1 - 2 * step / steps))
            optimizer.zero_grad()
            self.loss(conv, norm).backward()
            optimizer.step()


@pytest.fixture(scope="module")
def problem():
    return Problem()


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("momentum", "rings"),
        *map(slow, [("Adam", "rings"), ("AdamW", "kernels"), ("dampening", "full rings"), ("amsgrad", "rings")]),
        *map(slow, [("SGD", "squared rings"), ("SGD", "kernels"), ("momentum", "squared"), ("Adam", "squared rings")]),
        *map(slow, [("Adam", "squared"), ("Adam", "largest")]),
    ],
)
def test_every_optimizer_reaches_the_minimum_of_loss_and_penalty(problem, case, name):
    """For white inputs the loss is ``||z - teacher||^2 / 2`` of the folded filters z, so the minimum is a prox."""
    conv, norm = problem.student()
    kind, options = CASES[case]
    problem.train(conv, norm, make_optimizer(kind, conv, norm, INNER[name], **options), 400)
    expected, found = INNER[name].prox(problem.teacher, 1.0), folded(conv, norm)
    strong = problem.teacher.flatten(1).norm(dim=1) > 0.2  # other filters are slow, or stay where gamma has become zero
    assert (found - expected)[strong].abs().max() < STATIONARY
    assert torch.equal(found[strong] == 0, expected[strong] == 0)
    if name in ("rings", "kernels"):
        assert norm.weight[4] == 0
        assert not expected[4].any()
    if name == "rings":
        assert (expected[strong] == 0).any()
        assert torch.equal(conv.weight[strong] == 0, expected[strong] == 0)  # rings are zeroed in the weight


def test_a_kernel_that_the_loss_asks_for_comes_back(problem):
    conv, norm = problem.student()
    norm.weight.data.zero_()
    conv.weight.data = problem.teacher + 0.1 * conv.weight.data
    optimizer = make_optimizer("SGD", conv, norm, sparsity.KernelPenalty(0.3), lr=0.1, momentum=0.5)
    problem.train(conv, norm, optimizer, 200)
    assert (norm.weight[:4] != 0).all()
    assert norm.weight[4] == 0


# ---- values and proxes


@pytest.mark.parametrize("name", INNER)
def test_values_are_those_of_the_folded_kernels(name):
    """Their gradient is that of a penalty on ``gamma k / (rms ||k||)``; the network's output depends only on this."""
    (conv, norm), inner = make_layers(), INNER[name]
    sigma = (norm.running_var + norm.eps).sqrt()
    rms = sigma / conv.weight.detach().flatten(1).norm(dim=1)
    penalty = sparsity.FoldedPenalty(inner, norm)
    value = penalty.value(conv.weight)
    lengths = conv.weight.flatten(1).norm(dim=1)
    expected = inner.value(conv.weight * columns(norm.weight / (rms * lengths)))
    torch.testing.assert_close(value, expected)
    for found, wanted in zip(
        *(torch.autograd.grad(v, [conv.weight, norm.weight]) for v in (value, expected)), strict=True
    ):
        torch.testing.assert_close(found, wanted)
    tau = 0.5 * value.item()
    z = folded(conv, norm)
    assert torch.equal(penalty.threshold(conv.weight, tau) == 0, inner.threshold(z, tau) == 0)


@pytest.mark.parametrize("name", INNER)
def test_the_prox_keeps_the_norm_of_kernels_and_goes_down_the_gradient(name):
    conv, norm = make_layers()
    penalty = sparsity.FoldedPenalty(INNER[name], norm)
    before, step = (conv.weight.detach().clone(), norm.weight.detach().clone()), 1e-6
    weight, gamma = penalty.prox(conv.weight, step)
    assert same_bits(conv.weight.detach(), before[0])
    torch.testing.assert_close(weight.flatten(1).norm(dim=1), before[0].flatten(1).norm(dim=1))
    gradients = torch.autograd.grad(penalty.value(conv.weight), [conv.weight, norm.weight])
    for shrunk, old, gradient in zip((weight, gamma), before, gradients, strict=True):
        torch.testing.assert_close((old - shrunk) / step, gradient, rtol=1e-4, atol=1e-4)
    large, none = penalty.prox(conv.weight, 1e6)
    torch.testing.assert_close(large.flatten(1).norm(dim=1), before[0].flatten(1).norm(dim=1))
    assert penalty.penalty.power == 2 or not none.any()


def test_a_zero_or_a_variance_that_is_no_number_leaves_the_kernel_alone():
    conv, norm = make_layers()
    norm.weight.data[1], norm.running_var[2], norm.weight.data[3] = 0, torch.nan, torch.nan
    conv.weight.data[4, 0, 0, 0] = torch.nan
    weight, gamma = sparsity.FoldedPenalty(RINGS, norm).prox(conv.weight, 5.0)
    assert same_bits(weight[1:5], conv.weight.detach()[1:5])
    assert same_bits(gamma[1:5], norm.weight.detach()[1:5])
    assert not torch.equal(weight[0], conv.weight[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_core_that_cannot_take_the_filters_length_leaves_it_alone(dtype):
    conv, norm = nn.Conv1d(1, 1, 3, bias=False), make_norm(1)
    core = 1e-40 if dtype == torch.float32 else 1e-6
    conv.weight.data = torch.tensor([[[100.0, core, 100.0]]]).to(dtype)
    weight, _ = sparsity.FoldedPenalty(sparsity.RingPenalty(1.0), norm).prox(conv.weight, 1e9)
    assert weight.isfinite().all()


# ---- steps


@pytest.mark.parametrize("name", ["rings", "kernels", "squared"])
def test_a_step_is_torchs_and_then_the_prox_of_both_factors(name):
    """The prox has no metric, and the scales from before the step."""
    (conv, norm), (other, other_norm), inner = make_layers(), make_layers(), INNER[name]
    ours, theirs = [conv.weight, *norm.parameters()], [other.weight, *other_norm.parameters()]
    optimizer = make_optimizer("SGD", conv, norm, inner)
    optimizer.param_groups[1]["lr"] = 0.3
    plain = torch.optim.SGD([{"params": theirs[:1]}, {"params": theirs[1:], "lr": 0.3}], lr=0.1)
    for step in range(2):
        set_gradients(ours, step)
        gradients = [p.grad.clone() for p in ours]
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, gradients, strict=True))
        set_gradients(theirs, step)
        before = copy.deepcopy(other_norm)
        plain.step()
        with torch.no_grad():
            other.weight.copy_(sparsity.FoldedPenalty(inner, before).prox(other.weight, 0.1)[0])
            # The penalty multiplies gamma by these slopes; each product is then a kernel of one weight.
            slopes = torch.stack([type(inner)(1.0).value(kernel[None]) for kernel in other.weight])
            slopes /= (other_norm.running_var + other_norm.eps).sqrt()
            products = (slopes * other_norm.weight).view(-1, 1, 1)
            of_products = sparsity.KernelPenalty(inner.strength, power=inner.power)
            shrunk = of_products.prox(products, 1.0, 1 / (0.3 * slopes.square().view(-1, 1, 1)))
            other_norm.weight.copy_(shrunk.flatten() / slopes)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("name", CLASSES)
def test_groups_and_paths_of_all_kinds_agree(name):
    results = []
    ways = [{"foreach": True}, {"fused": False}, {"maximize": True}, {"scale": 8.0}, {"backend": "reference"}]
    ways += [{"maximize": True, "backend": "reference"}, {"scale": 8.0, "backend": "reference"}]
    for options in ({}, *ways):
        conv, norm = make_layers()
        scale, backend = options.pop("scale", None), options.pop("backend", "native")
        optimizer = make_optimizer(name, conv, norm, **options)
        for step in range(3):
            set_gradients([conv.weight, *norm.parameters()], step)
            for p in (conv.weight, *norm.parameters()):
                p.grad *= -1 if options.get("maximize") else scale or 1
            if scale is not None:
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(())
            with loco_ext.backend(backend):
                optimizer.step()
        results.append((conv.weight.detach(), norm.weight.detach(), conv.weight.grad.abs()))
    for other in results[1:]:
        for p, q in zip(results[0], other, strict=True):
            torch.testing.assert_close(p, q)


SHAPES = [(6, 2, 3, 3), (5, 24, 3, 3), (4, 3, 5), (7, 40, 1, 1), (3, 2, 2, 3, 2)]
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize(("name", "dtype", "power"), covering(CLASSES, TOLERANCES, [1, 2]), ids=str)
def test_kernels_of_the_prox_do_what_the_reference_does(name, dtype, power):
    """Some filters are zero, or have a scale that is, or a variance that is no number."""
    torch.manual_seed(0)
    weights = [torch.randn(shape) for shape in (SHAPES if power == 1 else SHAPES[1:4])]  # the reference takes long
    weights += [(0.3 * w).to(memory_format=LAYOUTS[w.dim()]) for w in weights if w.dim() in LAYOUTS]
    norms = [make_norm(len(weight)) for weight in weights]
    for weight, norm in zip(weights, norms, strict=True):
        weight[1], norm.weight.data[0], norm.running_var[2] = 0.0, 0.0, torch.nan
    penalties = [
        sparsity.RingPenalty(0.2, weighting="normalized", power=power),
        sparsity.KernelPenalty(0.1, power=power),
    ]
    results = []
    for backend in ("native", "reference"):
        own, others = [nn.Parameter(weight.to(dtype, copy=True)) for weight in weights], copy.deepcopy(norms)
        folded = [
            sparsity.FoldedPenalty(penalties[weight.shape[-1] == 1], norm)
            for weight, norm in zip(weights, others, strict=True)
        ]
        groups = [{"params": own, "penalty": folded}, {"params": [norm.weight for norm in others]}]
        options = (
            {"momentum": 0.5}
            if name == "SGD"
            else {"eps": 0.1, "state_dtype": None if dtype == torch.float64 else torch.float32}
        )
        optimizer = getattr(optim, name)(groups, lr=0.05, weight_decay=0.1, **options)
        with loco_ext.backend(backend):
            train(optimizer, 2)
            states = [state for p in own for state in optimizer.state[p].values()]
        results.append([*(p.detach() for p in own), *states, *(norm.weight.detach() for norm in others)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
        assert torch.equal(ours == 0, theirs == 0)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(
    "inner", [["rings"], ["largest in rings"], ["squared rings"], ["squared"], list(INNER)], ids=len
)
def test_layers_step_together_as_each_does_alone(name, inner):
    """They differ in shape, dtype, strength, learning rate, Adam's betas, the norm's constant and perhaps penalty."""

    def groups():
        torch.manual_seed(0)
        for i, shape in enumerate([(6, 2, 3, 3), (3, 4, 5, 5), (4, 1, 3, 1), (5, 2, 3)] * (1 + (len(inner) > 1))):
            dtype, norm = (torch.float64, torch.float32)[len(inner) > 1 and i % 2], make_norm(shape[0])
            norm.eps = 0.1 * i
            kind = INNER[inner[i % len(inner)]]
            penalty = [sparsity.FoldedPenalty(replace(kind, strength=0.1 + 0.1 * (i // 2)), norm)]
            weight = {
                "params": [nn.Parameter(torch.randn(shape, dtype=dtype))],
                "penalty": penalty,
                "lr": 0.1 + 0.1 * i,
            }
            weight |= {} if name == "SGD" else {"betas": (0.9, 0.9 + 0.01 * i)}
            yield [weight, {"params": [norm.weight], "lr": 0.5 - 0.1 * (i // 2)}]

    def step(layers):
        optimizer = getattr(optim, name)(layers)
        for _ in range(2):
            optimizer.step()
        return [p.detach() for group in layers for p in group["params"]]

    def with_gradients():
        layers = list(groups())
        set_gradients([p for layer in layers for group in layer for p in group["params"]], 0)
        return layers

    together = step([group for layer in with_gradients() for group in layer])
    alone = [p for layer in with_gradients() for p in step(layer)]
    for p, q in zip(together, alone, strict=True):
        torch.testing.assert_close(p, q)


def test_a_norm_of_two_convolutions_is_shrunk_by_both():
    convs, norm = [nn.Conv2d(2, 3, 3, bias=False).double() for _ in range(2)], make_norm(3).double()
    before = norm.weight.detach().clone()
    penalty = sparsity.FoldedPenalty(KERNELS, norm)
    optimizer = optim.SGD([{"params": [c.weight for c in convs], "penalty": [penalty] * 2}, {"params": [norm.weight]}])
    for p in (*(conv.weight for conv in convs), norm.weight):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    lengths = sum(conv.weight.detach().flatten(1).norm(dim=1) for conv in convs)
    expected = before.abs() - 1e-3 * KERNELS.strength * lengths / (norm.running_var + norm.eps).sqrt()
    torch.testing.assert_close(norm.weight.detach(), torch.copysign(expected, before))


@pytest.mark.parametrize("name", CLASSES)
def test_a_filter_of_one_ring_is_shrunk_as_a_whole_filter(name):
    results = []
    for inner in (sparsity.RingPenalty(0.3), KERNELS):
        conv, norm = nn.Conv2d(2, 6, 1, bias=False).double(), make_norm(6).double()
        nn.init.constant_(conv.weight, 0.5)
        optimizer = make_optimizer(name, conv, norm, inner)
        train(optimizer, 2)
        results.append((conv.weight.detach(), norm.weight.detach()))
    for of_rings, of_kernels in zip(*results, strict=True):
        torch.testing.assert_close(of_rings, of_kernels)


@pytest.mark.parametrize("name", CLASSES)
def test_each_factor_shrinks_when_it_has_a_gradient_and_nothing_does_in_a_skipped_step(name):
    conv, norm = make_layers()
    optimizer = make_optimizer(name, conv, norm)
    kept = conv.weight.detach().clone(), norm.weight.detach().clone()
    set_gradients([conv.weight, *norm.parameters()], 0)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(same_bits(p.detach(), q) for p, q in zip((conv.weight, norm.weight), kept, strict=True))
    del optimizer.found_inf
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert all(same_bits(p.detach(), q) for p, q in zip((conv.weight, norm.weight), kept, strict=True))
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    norm.weight.grad = None
    optimizer.step()
    assert same_bits(norm.weight.detach(), kept[1])
    conv.weight.grad, norm.weight.grad, before = None, torch.zeros(6).double(), conv.weight.detach().clone()
    optimizer.step()
    assert same_bits(conv.weight.detach(), before)
    assert (norm.weight != kept[1]).all()


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("inner", ["rings", "largest"])
def test_a_step_that_a_gpu_skips_changes_nothing(name, inner, monkeypatch):
    """There, the host does not read found_inf, and all of the step runs."""
    monkeypatch.setattr(LocalityOptimizer, "_step", lambda self, closure: self._step_groups())
    conv, norm = make_layers()
    parameters = [conv.weight, *norm.parameters()]
    optimizer = make_optimizer(name, conv, norm, INNER[inner])
    for found_inf in (0.0, 1.0):
        kept = [p.detach().clone() for p in parameters]
        set_gradients(parameters, 0)
        conv.weight.grad *= torch.inf if found_inf else 1.0
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(found_inf)
        with torch.no_grad():
            optimizer.step()
        assert all(same_bits(p.detach(), q) for p, q in zip(parameters, kept, strict=True)) == (found_inf == 1)


@pytest.mark.parametrize(
    ("name", "kind"), [("SGD", "none"), ("Adam", "other optimizer"), ("AdamW", "frozen"), ("SGD", "replaced")]
)
def test_a_norm_that_the_optimizer_does_not_step_is_a_typed_error(name, kind):
    conv, norm = make_layers()
    optimizer = make_optimizer(name, conv, norm)
    message = "penalty: expected the weight of the batch norm of a FoldedPenalty among the parameters"
    if kind == "frozen":
        norm.requires_grad_(False)
        message = "penalty: expected a batch norm whose weight requires a gradient"
    elif kind == "replaced":
        norm.weight = nn.Parameter(norm.weight.detach().clone())
    else:
        optimizer.param_groups.pop()
    if kind == "other optimizer":
        getattr(optim, name)(norm.parameters(), lr=0.1)
    conv.weight.grad = torch.ones_like(conv.weight)
    before = conv.weight.detach().clone()
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert same_bits(conv.weight.detach(), before)
    assert torch.equal(conv.weight.grad, torch.ones_like(before))


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_norms_whose_variances_differ_between_processes_are_a_warning(monkeypatch, kind):
    conv, norm = make_layers()[0], kind(6).double()
    optimizer = make_optimizer("SGD", conv, norm)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    set_gradients([conv.weight, *norm.parameters()], 0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer.step()
    assert ["got BatchNorm2d, whose running variances differ" in str(each.message) for each in found] == (
        [] if kind is nn.SyncBatchNorm else [True]
    )


def test_random_rounding_is_refused_and_narrow_types_are_shrunk():
    conv, norm = make_layers(dtype=torch.bfloat16)
    optimizer = make_optimizer("SGD", conv, norm, sparsity.RingPenalty(20.0))
    train(optimizer, 1)
    assert (conv.weight == 0).any()
    assert norm.weight.dtype == torch.bfloat16
    assert (norm.weight == 0).any()
    optimizer = make_optimizer("SGD", conv, norm, stochastic_rounding=3)
    with pytest.raises(NotImplementedError, match="stochastic_rounding: expected None for bfloat16"):
        train(optimizer, 1)


@pytest.mark.parametrize("name", CLASSES)
def test_checkpoints_and_copies_go_on_to_the_same_bits(name):
    whole = make_layers()
    optimizer = make_optimizer(name, *whole)
    train(optimizer, 1)
    state, *weights = through_a_file([each.state_dict() for each in (optimizer, *whole)])
    resumed = make_layers(seed=1)
    for layer, loaded in zip(resumed, weights, strict=True):
        layer.load_state_dict(loaded)
    other = make_optimizer(name, *resumed, sparsity.RingPenalty(1.0))
    other.load_state_dict(state)
    copies = [copy.deepcopy((whole, optimizer)), pickle.loads(pickle.dumps((whole, optimizer))), (resumed, other)]
    for each in (optimizer, *(copied for _, copied in copies)):
        train(each, 2, start=1)
    for (conv, norm), _ in copies:
        assert same_bits(conv.weight.detach(), whole[0].weight.detach())
        assert same_bits(norm.weight.detach(), whole[1].weight.detach())


# ---- errors and models


NORM = nn.BatchNorm2d(3)
FOLD = sparsity.FoldedPenalty


@pytest.mark.parametrize(
    ("make_bad", "error", "message"),
    [
        (lambda: FOLD(1.0, NORM), TypeError, "penalty: expected a RingPenalty or"),
        (lambda: FOLD(RINGS, nn.LayerNorm(3)), TypeError, "batch_norm: .*got LayerNorm"),
        (lambda: FOLD(RINGS, nn.BatchNorm2d(3, track_running_stats=False)), ValueError, "track_running_stats=True"),
        (lambda: FOLD(RINGS, nn.BatchNorm2d(3, affine=False)), ValueError, "batch_norm: expected one with affine=True"),
        (
            lambda: make_optimizer("SGD", nn.Conv2d(1, 2, 3), NORM),
            ValueError,
            "penalty of parameter 0: weight: expected 3 filters as batch_norm, got 2",
        ),
    ],
)
def test_what_cannot_be_folded_is_a_typed_error(make_bad, error, message):
    with pytest.raises(error, match=message):
        make_bad()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.other_norm = nn.BatchNorm2d(4)
        self.third = nn.Conv2d(4, 4, 1)
        self.plain_norm = nn.BatchNorm2d(4, track_running_stats=False)
        self.fourth = nn.Conv2d(4, 4, 1)
        self.fixed_norm = nn.BatchNorm2d(4, affine=False)
        self.fifth = nn.Conv2d(4, 4, 1)
        self.shared_norm = nn.BatchNorm2d(4)
        self.up = nn.ConvTranspose2d(4, 4, 3)
        self.unused = nn.Conv2d(1, 1, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        y = self.second(x)  # y is also read without its norm
        z = self.plain_norm(self.third(self.other_norm(y) + y))
        z = self.shared_norm(self.fifth(self.fixed_norm(self.fourth(z))))
        return self.shared_norm(self.up(z))


def test_convolutions_are_folded_where_only_a_norm_takes_their_output():
    model, penalty = Block(), sparsity.RingPenalty(1e-3)
    found = sparsity.folded_penalties(model, penalty)
    others = dict.fromkeys(("second", "third", "fourth", "fifth"), penalty)
    assert found == {"first": sparsity.FoldedPenalty(penalty, model.norm), **others}
    groups = optim.parameter_groups(model, 0.1, penalty=found)
    assert groups[0]["penalty"] == [found["first"], *[penalty] * 4, None, None]
    optim.SGD(groups, lr=0.1)
    model.second.weight = model.first.weight
    assert sparsity.folded_penalties(model, penalty)["first"] is penalty


def test_dead_kernels_become_zeros_that_change_no_output():
    model = Block().eval()
    model.norm.weight.data[:3], model.shared_norm.weight.data[:] = 0, 0
    x = torch.randn(2, 3, 5, 5)
    before, fifth = model(x), model.fifth.weight.detach().clone()
    assert sparsity.zero_dead_filters(model) == 3
    assert torch.equal(model(x), before)
    assert sparsity.kernel_sizes(model.first.weight).tolist() == [0, 0, 0, 3]
    assert torch.equal(model.fifth.weight, fifth)


class Tied(nn.Module):
    """A convolution, a batch norm, and another reader of the convolution's weight."""

    def __init__(self, reader):
        super().__init__()
        self.reader, self.conv, self.norm = reader, nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        if reader in ("transposed", "uncalled"):
            self.other = nn.ConvTranspose2d(4, 3, 3, padding=1) if reader == "transposed" else nn.Conv2d(3, 4, 3)
            self.other.weight = self.conv.weight

    def forward(self, x):
        y = self.norm(self.conv(x)).relu()
        if self.reader == "transposed":
            return self.other(y)
        if self.reader == "uncalled":
            return y + nn.functional.conv2d(x, self.other.weight, padding=1)
        return nn.functional.conv_transpose2d(y, self.conv.weight, padding=1)


@pytest.mark.parametrize("reader", ["transposed", "uncalled", "function"])
def test_weights_that_something_else_reads_are_neither_folded_nor_cleared(reader):
    model, penalty, x = Tied(reader).eval(), sparsity.RingPenalty(1e-3), torch.randn(2, 3, 5, 5)
    with torch.no_grad():
        model.norm.weight[:2] = 0
        model.norm.bias.fill_(1)
    before = model(x)
    assert sparsity.zero_dead_filters(model) == 0
    assert torch.equal(model(x), before)
    assert sparsity.folded_penalties(model, penalty) == {"conv": penalty}


def test_a_convolution_alone_is_a_model_without_norms():
    conv, penalty = nn.Conv2d(3, 4, 3), sparsity.RingPenalty(1e-3)
    assert sparsity.folded_penalties(conv, penalty) == {"": penalty}
    assert optim.parameter_groups(conv, 0.1, penalty={"": penalty})[0]["penalty"] == [penalty]
    assert sparsity.zero_dead_filters(conv) == 0


class Casts(nn.Module):
    """Asks the convolution's weight for its dtype; decides by values, so that it cannot be traced, if told to."""

    def __init__(self, decides):
        super().__init__()
        self.decides, self.conv, self.norm = decides, nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        if self.decides and x.sum() > 0:
            return x
        return self.norm(self.conv(x.to(self.conv.weight.dtype)))


def test_a_weight_may_be_asked_for_its_dtype_and_what_cannot_be_traced_is_an_error():
    assert type(sparsity.folded_penalties(Casts(False), RINGS)["conv"]) is sparsity.FoldedPenalty
    for use in (lambda model: sparsity.folded_penalties(model, RINGS), sparsity.zero_dead_filters):
        with pytest.raises(ValueError, match=r"model: expected one that torch\.fx can trace, got TraceError"):
            use(Casts(True))
        with pytest.raises(TypeError, match="model: expected a module, got NoneType"):
            use(None)
