"""Tests of PILCRO: its gradient against create_graph and finite differences, and what it leaves as it was."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from loco_ext.regularizers import PILCRO, data_smoothness
from tests.regularizers.networks import CLASSES, NETWORKS, SIZE, images, make

NEAR = 1e-9  # tolerance in units of the gradient's largest number, in float64


def gradient(pilcro: PILCRO, model: nn.Module, x: Tensor) -> Tensor:
    """Return all parameters' gradients in one vector, zeros where there are none."""
    model.zero_grad()
    pilcro(model, x).backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 0
    assert (found - expected).abs().max() <= NEAR * expected.abs().max()


@sdpa_kernel(SDPBackend.MATH)  # torch cannot differentiate the other kinds twice
def create_graph(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """Return the gradient of the exact expectation's target loss, by torch alone."""
    model = copy.deepcopy(model).eval()
    if getattr(model, "activation", None) is F.hardsigmoid:  # torch cannot differentiate it twice
        model.activation = lambda x: (x / 6 + 0.5).clamp(0, 1)
    x = x.clone().requires_grad_()
    logits = model(x * 1)
    probabilities = logits.softmax(1)
    squares = 0
    for k in range(CLASSES):
        (g,) = torch.autograd.grad(logits[:, k].sum(), x, create_graph=True)
        squares = squares + (probabilities[:, k].view(-1, 1, 1, 1) * g**2).mean(0)
    n = squares.norm(dim=0)
    loss = (n.numel() ** 0.5 * n / n.norm() - target).square().sum()
    found = torch.autograd.grad(3 * loss, list(model.parameters()), materialize_grads=True)
    return torch.cat([part.flatten() for part in found])


@pytest.mark.parametrize("name", NETWORKS)
def test_the_gradient_is_create_graphs(name):
    """Layers keep their inputs only for networks whose gradient needs them, and few networks take the other route."""
    model, x = make(name), images()
    target = data_smoothness(x)
    expected = create_graph(model, x, target)
    pixels = x[0, 0].numel()
    for options in ({}, {"chunk_size": 3}, {"route": "double_backward"}, {"reduction": "mean"}):
        alpha = 3.0 * pixels if "reduction" in options else 3.0
        found = gradient(PILCRO("target", alpha, target=target, expectation="exact", **options), model, x)
        assert_near(found, expected)
    tangent, chunks = PILCRO(), PILCRO(chunk_size=2)
    sampled = gradient(tangent, model, x)
    for other in (chunks, PILCRO(route="double_backward")):
        assert_near(gradient(other, model, x), sampled)
    assert tangent._route._keep_inputs == (name in ("smooth", "hard sigmoid", "attention"))
    assert tangent._route._is_unsuited == (name in ("checkpointed", "siamese", "overwriting"))


@pytest.mark.parametrize("by_batch", [False, True], ids=["running statistics", "statistics of the batch"])
def test_the_gradient_is_that_of_finite_differences(by_batch):
    model, x = make("batch norm and pooling"), images()
    if by_batch:  # of one image, these have no statistics
        norm = nn.BatchNorm1d(4, track_running_stats=False)
        model = nn.Sequential(nn.Conv2d(3, 4, SIZE), nn.Flatten(), norm, nn.ReLU(), nn.Linear(4, CLASSES)).double()
    pilcro = PILCRO(every=1, expectation="exact")
    found = gradient(pilcro, model, x)[: model[0].weight.numel()].view_as(model[0].weight)
    direction, step = torch.randn_like(found), 1e-6
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            model[0].weight.add_(direction, alpha=sign * step)
            losses.append(pilcro(model, x).item())
            model[0].weight.add_(direction, alpha=-sign * step)
    assert (found * direction).sum().item() == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-5)


def test_it_applies_every_so_many_calls_and_goes_on_from_its_state():
    model, x = make("plain"), images()
    first = PILCRO(every=3, alpha=2, alpha_scaling="T")
    losses = [first(model, x).item() for _ in range(7)]
    assert [loss > 0 for loss in losses] == [True, False, False, True, False, False, True]
    assert losses[0] != losses[3]  # other classes are drawn
    assert losses[0] == pytest.approx(6 * PILCRO()(model, x).item())
    second = PILCRO(every=3, alpha=2, alpha_scaling="T")
    for _ in range(5):
        first(model, x)
    second.load_state_dict(first.state_dict())
    assert [first(model, x).item() for _ in range(4)] == [second(model, x).item() for _ in range(4)]
    zero = first(model, x)
    assert zero.dtype == torch.float64
    zero.backward()  # must not raise


class Noisy(nn.Module):
    """Draws numbers in evaluation mode too, and can fail."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.fails = model, False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise torch.OutOfMemoryError("no memory")
        return self.model(nn.functional.dropout(x, 0.3, training=True))


@pytest.mark.parametrize("fails", [False, True])
def test_flags_statistics_images_and_random_numbers_stay_as_they_were(fails):
    """A call that fails does not count, and the next one takes the same route."""
    model, x, pilcro = Noisy(make("batch norm and pooling").train()), images(), PILCRO(chunk_size=3)
    model.model[1].eval()
    model.fails = fails
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags, copy, state = [m.training for m in model.modules()], x.clone(), torch.get_rng_state()
    with pytest.raises(torch.OutOfMemoryError, match="no memory") if fails else contextlib.nullcontext():
        pilcro(model, x).backward()
    assert pilcro.state_dict() == {"calls": 0 if fails else 1}
    assert not pilcro._route._is_unsuited
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(x, copy)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def test_chunks_of_a_model_that_draws_numbers_see_the_same_ones():
    model, x = Noisy(make("plain")), images(6)
    loss = PILCRO(chunk_size=3)
    assert_near(gradient(loss, model, x), gradient(PILCRO(chunk_size=3, route="double_backward"), model, x))


def test_a_loss_scale_may_be_beyond_the_range_of_the_parameters():
    model, x = make("plain").half(), images().half()
    expected = gradient(PILCRO(alpha=1e-3), model, x)
    scaled = gradient(lambda *args: PILCRO(alpha=1e-3)(*args) * 2.0**16, model, x)
    assert torch.equal(scaled, expected * 2.0**16)


def test_chunks_add_up_in_half_precision():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.Flatten(), nn.Linear(8, 3)).bfloat16()
    x = torch.rand(1, 1, 4, 4).bfloat16().expand(600, -1, -1, -1)
    found = gradient(PILCRO(chunk_size=1), model, x)
    expected = gradient(PILCRO(), model.double(), x.double())
    assert (found - expected).norm() < 4 * torch.finfo(torch.bfloat16).eps * expected.norm()


def test_it_works_with_a_scaler_autocast_frozen_layers_and_compiled_models():
    model, x = make("residual").float(), images().float()
    expected = gradient(PILCRO(), model, x)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert PILCRO()(model, x).dtype == torch.float32
        scaled = gradient(lambda *args: scaler.scale(PILCRO()(*args)), model, x)
    torch.testing.assert_close(scaled / 1024, expected)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(gradient(PILCRO(), compiled, x), expected)
    model.linear.requires_grad_(False)
    frozen = sum(p.numel() for p in model.linear.parameters())
    found = gradient(PILCRO(), model, x)
    assert model.linear.weight.grad is None
    torch.testing.assert_close(found[:-frozen], expected[:-frozen])


@pytest.mark.usefixtures("mesh")
def test_distributed_data_parallel_may_find_parameters_unused():
    model, x = make("plain"), images()
    expected = gradient(PILCRO(), model, x)
    model.unused = nn.Linear(2, 2).double()
    model.forward = lambda x: nn.Sequential(*list(model)[:-1])(x)
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    found = gradient(lambda *args: PILCRO()(*args) + 0 * parallel(x).sum(), parallel, x)
    assert_near(found[: len(expected)], expected)
    assert model.unused.weight.grad is None


@pytest.mark.parametrize("options", [{"expectation": "exact"}, {"route": "double_backward"}], ids=str)
def test_hooks_of_parameters_run_once(options):
    model, x = make("plain"), images()
    once = gradient(PILCRO(**options), model, x)
    twice = once.clone()
    twice[: model[0].weight.numel()] *= 2
    hook = model[0].weight.register_hook(lambda g: 2 * g)
    assert_near(gradient(PILCRO(**options), model, x), twice)
    hook.remove()
    assert_near(gradient(PILCRO(**options), model, x), once)


def test_a_compiled_step_calls_it():
    model, x = make("plain"), images()
    labels, pilcro = torch.arange(7) % CLASSES, PILCRO(every=1)

    def step() -> Tensor:
        loss = cross_entropy(model(x), labels) + pilcro(model, x)
        loss.backward()
        return loss.detach()

    compiled = torch.compile(step, backend="eager")
    model.zero_grad()
    found = compiled(), model[0].weight.grad.clone()
    model.zero_grad()
    pilcro.load_state_dict({"calls": 0})
    expected = step(), model[0].weight.grad.clone()
    torch.testing.assert_close(found, expected)


def test_networks_that_ignore_their_images_have_no_gradient_and_no_nan():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, CLASSES)).double()
    nn.init.zeros_(model[1].weight)
    assert not gradient(PILCRO(every=1), model, images()).any()


def test_a_target_of_one_row_needs_no_laplacian():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(32, CLASSES)).double(), images()[:, :, :1]
    assert gradient(PILCRO("target", target=torch.linspace(0, 1, SIZE)[None]), model, x).any()


class Detached(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


MODEL, X = make("plain").float(), torch.rand(2, 3, 8, 8)
WRONG = {
    "mode: expected one of": lambda: PILCRO("flat"),
    "alpha: expected a finite number": lambda: PILCRO(alpha=-1),
    "every: expected at least 1": lambda: PILCRO(every=0),
    "target: expected a map": lambda: PILCRO("target"),
    "target: expected None": lambda: PILCRO(target=torch.ones(8, 8)),
    "reduction: expected None for mode 'curvature'": lambda: PILCRO(reduction="mean"),
    "route: expected one of": lambda: PILCRO(route="forward"),
    "seed: expected an int of 64 bits": lambda: PILCRO(seed=2**70),
    "state: expected a mapping with the key 'calls'": lambda: PILCRO().load_state_dict({}),
    "laplacian_kernel: expected at most 1 taps": lambda: PILCRO()(MODEL, X[:, :, :1]),
    "x: expected images of shape": lambda: PILCRO()(MODEL, X[:, 0]),
    "target: expected the images' size": lambda: PILCRO("target", target=torch.ones(4, 4))(MODEL, X),
    r"model: expected an output of shape \(2, classes\)": lambda: PILCRO()(nn.Conv2d(3, 3, 1), X),
    "model: expected an output that can be differentiated": lambda: PILCRO()(Detached(MODEL), X),
    "model: expected parameters that require": lambda: PILCRO()(nn.Flatten(), X),
    "model: expected a module": lambda: PILCRO()(torch.relu, X),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    with pytest.raises((TypeError, ValueError), match=message):
        WRONG[message]()
