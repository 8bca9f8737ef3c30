"""Tests of optimizer steps captured in CUDA graphs and replayed: they give the CPU reference's bits."""

import pytest
import torch

from tests.optim.cuda_graphs import capture, gradients_of, refill
from tests.optim.gpu import BF16, SCALE, assert_same, give_gradients, make_twins, no_syncs, set_in_groups, step_both
from tests.optim.stepping import CLASSES, RICH, params_of

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("name", CLASSES)
def test_replayed_steps_give_the_references_bits_whatever_is_stepped_between(name):
    ours, reference = make_twins(name)
    step_both(ours, reference, 0, waits=True)
    give_gradients(ours, reference, 1)
    gradients, lr = gradients_of(ours), RICH[name]["lr"]
    graph = capture(ours)
    assert_same(ours, reference)
    for step in range(1, 6):
        refill(gradients, reference, step)
        with no_syncs():
            graph.replay()
        reference.step()
        assert_same(ours, reference)
        if step % 2:
            # An eager step between replays, with its own gradients and a learning rate other than the graph's.
            set_in_groups((ours, reference), lr=lr / (1 + step))
            step_both(ours, reference, 100 + step)
            set_in_groups((ours, reference), lr=lr)


@pytest.mark.parametrize("name", CLASSES)
def test_replays_follow_what_lives_on_the_gpu(name):
    ours, reference = make_twins(name)
    step_both(ours, reference, 0, waits=True)
    ours.param_groups[0]["lr"], reference.param_groups[0]["lr"] = torch.tensor(0.05, device="cuda"), torch.tensor(0.05)
    give_gradients(ours, reference, 1)
    gradients = gradients_of(ours)
    ours.grad_scale, ours.found_inf = torch.tensor(SCALE, device="cuda"), torch.tensor(0.0, device="cuda")
    graph = capture(ours)
    for step, (lr, found) in enumerate([(0.05, 0.0), (0.02, 0.0), (0.02, 1.0), (0.3, 0.0)], start=1):
        refill(gradients, reference, step)
        for grad in gradients:
            grad.mul_(SCALE)
        for optimizer in (ours, reference):
            optimizer.param_groups[0]["lr"].fill_(lr)
        ours.found_inf.fill_(found)
        with no_syncs():
            graph.replay()
        if not found:
            reference.step()
        assert_same(ours, reference)


def test_one_graph_may_step_several_optimizers():
    pairs = [make_twins(name) for name in CLASSES]
    for pair in pairs:
        step_both(*pair, 0, waits=True)
        give_gradients(*pair, 1)
    graph = capture(*(ours for ours, _ in pairs))
    for _ in range(3):
        graph.replay()
        for ours, reference in pairs:
            reference.step()
            assert_same(ours, reference)


@pytest.mark.parametrize("name", CLASSES)
def test_a_first_step_cannot_be_captured(name):
    ours, reference = make_twins(name)
    give_gradients(ours, reference, 0)
    with pytest.raises(RuntimeError, match="expected the optimizer to have made a step before"):
        capture(ours)
    assert not any(ours.state.get(p) for p in params_of(ours))
    step_both(ours, reference, 0, waits=True)
    give_gradients(ours, reference, 1)
    graph = capture(ours)
    graph.replay()
    reference.step()
    assert_same(ours, reference)


@pytest.mark.parametrize("name", CLASSES)
def test_stochastic_rounding_cannot_be_captured(name):
    twins = make_twins(name, dtype=BF16, stochastic_rounding=7)
    for step in range(2):
        step_both(*twins, step, waits=step == 0)
    give_gradients(*twins, 2)
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        capture(twins[0])
    step_both(*twins, 2)
