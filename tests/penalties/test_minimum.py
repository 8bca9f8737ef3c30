"""Tests that all optimizers reach the minimum of loss and penalty that SPAMS' FISTA and CVXPY find."""

import cvxpy
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from loco_ext import geometry, optim, sparsity
from tests.covering import slow
from tests.ring_prox.solvers import clarabel, tree_of
from tests.tolerances import BY_INTERIOR_POINTS

KERNELS, CHANNELS, SIZE = 6, 3, 3
STRENGTH, SQUARED_STRENGTH = 0.25, 0.2
# Tolerance of the comparison with the minimum; the optimizers' last steps are far smaller.
CLOSE = 1e-4
CASES = {
    "SGD": ("SGD", {"lr": 0.3}),
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9}),
    "nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "dampening": ("SGD", {"lr": 0.2, "momentum": 0.8, "dampening": 0.5}),
    "Adam": ("Adam", {"lr": 0.02}),
    "amsgrad": ("Adam", {"lr": 0.02, "amsgrad": True}),
    "AdamW": ("AdamW", {"lr": 0.02, "weight_decay": 0.0}),
}
RINGS = geometry.ring_index((SIZE, SIZE)).flatten().tolist()


@pytest.fixture(scope="module")
def problem() -> tuple[Tensor, Tensor]:
    """Return inputs ``[samples, weights of a filter]`` of different sizes, and answers ``[samples, filters]``.

    The answers depend less on a filter's outer weights.
    """
    generator = torch.Generator().manual_seed(3)
    width = CHANNELS * SIZE * SIZE
    inputs = torch.randn(200, width, generator=generator, dtype=torch.float64)
    inputs *= torch.rand(width, generator=generator, dtype=torch.float64) + 0.5
    decay = torch.tensor([0.02, 0.3, 1.0], dtype=torch.float64)[RINGS]
    truth = torch.randn(KERNELS, CHANNELS, SIZE * SIZE, generator=generator, dtype=torch.float64) * decay
    truth *= torch.tensor([1.0, 1.0, 0.5, 0.5, 0.1, 0.02], dtype=torch.float64)[:, None, None]
    noise = torch.randn(200, KERNELS, generator=generator, dtype=torch.float64)
    return inputs, inputs @ truth.flatten(1).T + 0.1 * noise


@pytest.fixture(scope="module")
def minimum(problem: tuple[Tensor, Tensor]) -> Tensor:
    """Minimize ``1/2 ||inputs w - answers||^2 / samples + strength * sum_n ||k(G_n)||`` by SPAMS."""
    spams = pytest.importorskip("spams")
    inputs, answers = (part.numpy() / len(part) ** 0.5 for part in problem)
    order = np.argsort(-np.asarray(RINGS), kind="stable")  # from the centre outwards, the root's own variables first
    columns = inputs.reshape(-1, CHANNELS, SIZE * SIZE)[:, :, order].transpose(0, 2, 1).reshape(len(inputs), -1)
    tree = tree_of(RINGS, CHANNELS, np.ones(max(RINGS) + 1))
    start = np.zeros((columns.shape[1], KERNELS), order="F")
    options = {"loss": "square", "regul": "tree-l2", "lambda1": STRENGTH, "max_it": 1000, "tol": 1e-12}
    found = spams.fistaTree(
        np.asfortranarray(answers), np.asfortranarray(columns), start, tree, False, numThreads=1, **options
    )
    weight = np.empty((KERNELS, CHANNELS, SIZE * SIZE))
    weight[:, :, order] = found.T.reshape(KERNELS, SIZE * SIZE, CHANNELS).transpose(0, 2, 1)
    return torch.from_numpy(weight).view(KERNELS, CHANNELS, SIZE, SIZE)


def trained(problem: tuple[Tensor, Tensor], name: str, penalty: sparsity.Penalty, steps: int, **options) -> Tensor:
    """Return the weights after full-batch training with a learning rate that decays to almost zero."""
    inputs, answers = problem
    weight = nn.Parameter(torch.full((KERNELS, CHANNELS, SIZE, SIZE), 0.1, dtype=torch.float64))
    optimizer = getattr(optim, name)([weight], penalty=penalty, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 30 ** (1 - 2 * step / steps)))
    for _ in range(steps):
        with torch.no_grad():
            errors = inputs @ weight.flatten(1).T - answers
            weight.grad = (errors.T @ inputs / len(inputs)).view_as(weight)
        optimizer.step()
        schedule.step()
    return weight.detach()


@pytest.mark.parametrize(
    "case", [slow(case) if case in ("nesterov", "dampening", "amsgrad") else case for case in CASES]
)
def test_every_optimizer_reaches_the_minimum_and_its_support(problem, minimum, case):
    name, options = CASES[case]
    weight = trained(problem, name, sparsity.RingPenalty(STRENGTH), 1500, **options)
    sizes = sparsity.kernel_sizes(minimum)
    assert len(set(sizes.tolist())) >= 3  # some kernels are zero, some whole, some in between
    assert (weight - minimum).abs().max() < CLOSE
    assert torch.equal(weight != 0, minimum != 0)


@pytest.mark.parametrize("case", ["dampening", slow("amsgrad")])
def test_optimizers_reach_the_minimum_of_a_squared_penalty(problem, case):
    """CVXPY minimises ``||inputs w - answers||^2 / 2n + strength * (sum_j ||w_j||)^2``."""
    name, options = CASES[case]
    inputs, answers = problem
    w = cvxpy.Variable((KERNELS, inputs.shape[1]))
    fit = cvxpy.sum_squares(inputs.numpy() @ w.T - answers.numpy()) / (2 * len(inputs))
    total = cvxpy.sum(cvxpy.norm(w, 2, axis=1))
    clarabel(cvxpy.Problem(cvxpy.Minimize(fit + SQUARED_STRENGTH * cvxpy.square(total))))
    expected = torch.from_numpy(w.value)
    found = trained(problem, name, sparsity.KernelPenalty(SQUARED_STRENGTH, power=2), 500, **options).flatten(1)
    assert (found - expected).abs().max() < CLOSE
    dead = expected.norm(dim=1) < BY_INTERIOR_POINTS**0.5
    assert 0 < dead.sum() < KERNELS
    assert torch.equal(found.norm(dim=1) == 0, dead)
