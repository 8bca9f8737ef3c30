"""Importance by resampling against an exact mean over all images; Lemma 1 where its assumptions hold and where not."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from loco_ext.analysis import (
    ablation_curve,
    gradient_importance,
    gradient_norm,
    integrated_gradients,
    interpolate,
    permutation_importance,
    top_hessian_eigenvalue,
)
from tests.tolerances import STANDARD_ERRORS, ULPS

F64 = torch.float64
CLOSE = {"rtol": 100 * ULPS[F64] * torch.finfo(F64).eps, "atol": 1e-14}
UNITS = torch.tensor([[0, 0, 0], [1, 2, 1], [1, 1, 3]])


def network(bend):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), bend, nn.Flatten(), nn.Linear(6, 3)).to(F64)


def images(count=7):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 2, 3, 4, generator=generator, dtype=F64)
    return x, torch.randint(3, (count,), generator=generator)


def exact(model, x, targets, unit):
    """Return eq. 10 with the mean over all images in the place of draws."""
    channel, row, column = unit
    total = 0.0
    for i, target in enumerate(targets):
        changed = x[i].repeat(len(x), 1, 1, 1)
        changed[:, channel, row, column] = x[:, channel, row, column]
        total += (model(changed)[:, target].mean() - model(x[i][None])[0, target]).square().item()
    return total / len(x)


def test_resampling_has_the_exact_importance_as_its_mean():
    model, (x, targets) = network(nn.Tanh()).eval(), images()
    model[4].weight.data *= 3  # far from linear
    seeds = 100
    runs = [permutation_importance(model, x, targets, UNITS, draws=2, seed=seed) for seed in range(seeds)]
    found = torch.stack(runs)
    expected = torch.tensor([exact(model, x, targets, unit) for unit in UNITS.tolist()], dtype=F64)
    error = (found.mean(0) - expected).abs() / (found.std(0) / seeds**0.5)
    assert (error < STANDARD_ERRORS).all()
    assert torch.equal(runs[5], permutation_importance(model, x, targets, UNITS, draws=2, seed=5))
    more = permutation_importance(model, x, targets, UNITS, draws=1000)
    assert ((more - expected).abs() < 0.1 * expected).all()


def test_the_lemma_is_exact_for_a_linear_network():
    """There the exact importance is ``(h'_i)^2 V[x_i]``, if ``h`` is one logit."""
    model, (x, _) = network(nn.Identity()), images()
    targets = torch.ones(len(x), dtype=torch.int64)
    model[1].running_var.fill_(2.5)
    modes = [module.training for module in model.modules()]
    found = gradient_importance(model, x, targets)
    assert [module.training for module in model.modules()] == modes
    model.eval()
    expected = [exact(model, x, targets, unit) for unit in itertools.product(range(2), range(3), range(4))]
    torch.testing.assert_close(found.flatten(), torch.tensor(expected, dtype=F64), **CLOSE)


class Normalised(nn.Module):
    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place

    def forward(self, x):
        return x.sub_(0.5).div_(0.25) if self.in_place else (x - 0.5) / 0.25


def string(model, x, targets):
    """Return the parameters in the middle of a string between a model and a copy of it."""
    options = {"loss": cross_entropy, "data": [(x, targets)], "steps": 2}
    path = interpolate(model, copy.deepcopy(model), 3, "string", **options)
    return torch.cat([parameter.detach().flatten() for parameter in list(path)[1][1].parameters()])


MEASURES = {
    "permutation": lambda model, x, targets: permutation_importance(model, x, targets, UNITS),
    "gradient": gradient_importance,
    "integrated": lambda model, x, targets: integrated_gradients(model, x, targets, x[:1], steps=7),
    "ablation": lambda model, x, targets: ablation_curve(model, x, targets, x, (1, 5)),
    "norm": lambda model, x, targets: gradient_norm(model, cross_entropy, [(x, targets)]),
    "eigenvalue": lambda model, x, targets: (
        top_hessian_eigenvalue(model, cross_entropy, [(x, targets)], iterations=3).value
    ),
    "string": string,
}


def test_models_that_write_to_their_input_are_measured_like_others():
    x, targets = images()
    before, rest = x.clone(), network(nn.Tanh())
    for name, measure in MEASURES.items():
        one, other = (measure(nn.Sequential(Normalised(in_place), rest), x, targets) for in_place in (True, False))
        torch.testing.assert_close(one, other, msg=name)
        assert torch.equal(x, before), name


class Constant(nn.Module):
    """A model that ignores its images."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([0.5, 1.0, -1.0], dtype=F64))

    def forward(self, x):
        return self.logits.expand(len(x), 3)


def test_images_that_a_model_ignores_have_no_importance():
    x, targets = images()
    for name in ("permutation", "gradient", "integrated"):
        assert not MEASURES[name](Constant(), x, targets).any(), name
    for name in ("gradient", "integrated"):
        with pytest.raises(ValueError, match="model: expected an output that can be differentiated"):
            MEASURES[name](Constant().requires_grad_(False), x, targets)


class Drawing(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


SETTINGS = {
    "default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_the_caller_has_set_changes_no_measure(setting):
    """Images and targets that are made in inference mode are measured outside of it as well."""
    model, (x, targets) = nn.Sequential(Drawing(), network(nn.Tanh()).float()), images()
    x, state = x.float(), torch.get_rng_state()
    for name, measure in MEASURES.items():
        expected = measure(model, x, targets)
        with SETTINGS[setting]():
            one, classes = x.clone(), targets.clone()
            found = measure(model, one, classes)
        assert torch.equal(torch.get_rng_state(), state), name
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=name)
        torch.testing.assert_close(measure(model, one, classes), expected, rtol=0, atol=0, msg=name)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_measures():
    model, (x, targets) = network(nn.Tanh()), images()

    def measure(x):
        return [MEASURES[name](model, x, targets) for name in ("permutation", "gradient", "integrated", "ablation")]

    torch.testing.assert_close(torch.compile(measure, backend="eager")(x), measure(x))


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_data_parallel_models_are_measured_without_their_wrapper():
    model, (x, targets) = network(nn.Tanh()), images()
    parallel = nn.parallel.DistributedDataParallel(model)
    calls = []
    parallel.register_forward_pre_hook(lambda module, args: calls.append(module))
    for name, measure in MEASURES.items():
        if name != "string":  # it runs a copy
            torch.testing.assert_close(measure(parallel, x, targets), measure(model, x, targets), msg=name)
    assert not calls


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"units": torch.zeros(1, 3)}, TypeError),
        ({"units": torch.tensor([[0, 0]])}, ValueError),
        ({"units": torch.tensor([[0, 0, 4]])}, ValueError),
        ({"units": torch.tensor([[0, -1, 0]])}, ValueError),
        ({"draws": 1}, ValueError),
        ({"draws": 2.5}, TypeError),
        ({"seed": -1}, ValueError),
        ({"targets": torch.zeros(7)}, TypeError),
        ({"x": torch.zeros(7, 24)}, ValueError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_input_is_named(bad, error):
    x, targets = images()
    arguments = {"model": network(nn.ReLU()), "x": x, "targets": targets, "units": UNITS} | bad
    with pytest.raises(error, match=f"^{next(iter(bad))}: expected .*got"):
        permutation_importance(**arguments)
