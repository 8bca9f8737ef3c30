"""Tests of optimizer steps captured in CUDA graphs and replayed: they give the CPU reference's results."""

import pytest
import torch

from tests.gpu import no_syncs
from tests.optim import gpu
from tests.optim.gpu import BF16, PENALTIES, SCALE
from tests.optim.stepping import CLASSES

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("penalty", [None, "rings"])
@pytest.mark.parametrize("name", CLASSES)
def test_replayed_steps_are_the_references_whatever_is_stepped_between(name, penalty):
    ours, reference = twins = gpu.make_twins(name, penalty=penalty)
    gpu.step_both(*twins, 0, waits=True)
    gpu.give_gradients(*twins, 1)
    gradients, lr, its_penalty = gpu.gradients_of(ours), ours.param_groups[0]["lr"], ours.param_groups[0]["penalty"]
    graph = gpu.capture(ours)
    gpu.assert_same(*twins)
    for step in range(1, 6):
        gpu.refill(gradients, reference, step)
        with no_syncs():
            graph.replay()
        reference.step()
        gpu.assert_same(*twins)
        if step % 2:
            # An eager step between replays, with its own gradients, penalty and learning rate.
            other = None if penalty is None else PENALTIES["kernels"]
            gpu.set_in_groups(twins, lr=lr / (1 + step), penalty=other)
            gpu.step_both(*twins, 100 + step, waits=penalty is not None)
            gpu.set_in_groups(twins, lr=lr, penalty=its_penalty)


@pytest.mark.parametrize("penalty", [None, "rings", "joint", "joint, largest"])
@pytest.mark.parametrize("name", CLASSES)
def test_replays_follow_what_lives_on_the_gpu(name, penalty):
    ours, reference = twins = gpu.make_twins(name, penalty=penalty)
    gpu.put_rates(*twins)
    gpu.step_both(*twins, 0, waits=True)
    gpu.give_gradients(*twins, 1)
    gradients = gpu.gradients_of(ours)
    ours.grad_scale, ours.found_inf = torch.tensor(SCALE, device="cuda"), torch.tensor(0.0, device="cuda")
    graph = gpu.capture(ours)
    for step, (lr, found) in enumerate([(0.05, 0.0), (0.02, 0.0), (0.02, 1.0), (0.1, 0.0)], start=1):
        gpu.refill(gradients, reference, step)
        for grad in gradients:
            grad.mul_(SCALE)
        gpu.fill_rates(twins, lr)
        ours.found_inf.fill_(found)
        with no_syncs():
            graph.replay()
        if not found:
            reference.step()
        gpu.assert_same(*twins)


def test_one_graph_may_step_several_optimizers():
    pairs = [gpu.make_twins(name) for name in CLASSES]
    for pair in pairs:
        gpu.step_both(*pair, 0, waits=True)
        gpu.give_gradients(*pair, 1)
    graph = gpu.capture(*(ours for ours, _ in pairs))
    for _ in range(3):
        graph.replay()
        for ours, reference in pairs:
            reference.step()
            gpu.assert_same(ours, reference)


@pytest.mark.parametrize("name", CLASSES)
def test_a_first_step_cannot_be_captured(name):
    ours, reference = gpu.make_twins(name)
    gpu.give_gradients(ours, reference, 0)
    with pytest.raises(RuntimeError, match="expected the optimizer to have made a step before"):
        gpu.capture(ours)
    assert not any(ours.state.get(p) for p in ours.param_groups[0]["params"])
    gpu.step_both(ours, reference, 0, waits=True)
    gpu.give_gradients(ours, reference, 1)
    graph = gpu.capture(ours)
    graph.replay()
    reference.step()
    gpu.assert_same(ours, reference)


@pytest.mark.parametrize("name", CLASSES)
def test_stochastic_rounding_cannot_be_captured(name):
    twins = gpu.make_twins(name, dtype=BF16, stochastic_rounding=7)
    for step in range(2):
        gpu.step_both(*twins, step, waits=step == 0)
    gpu.give_gradients(*twins, 2)
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        gpu.capture(twins[0])
    gpu.step_both(*twins, 2)
