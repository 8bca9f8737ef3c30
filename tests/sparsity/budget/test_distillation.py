"""The distillation loss: Hinton's formula in float64, its gradient by finite differences, and what it refuses."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from loco_ext import sparsity
from loco_ext.sparsity import distillation_loss
from tests.covering import covering


def logits(scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    ours, theirs = scale * torch.randn(2, 7, 5, generator=generator, dtype=torch.float64)
    return ours.to(dtype), theirs.to(dtype), torch.randint(5, (7,), generator=generator)


def formula(ours, theirs, targets, weight, temperature):
    """Return the loss in float64 from sums over samples and classes."""
    ours, theirs = ours.double().numpy(), theirs.double().numpy()
    total = 0.0
    for student, teacher, target in zip(ours, theirs, targets.tolist(), strict=True):
        log_q, log_p = log_softmax(student / temperature), log_softmax(teacher / temperature)
        divergence = sum(np.exp(p) * (p - q) for p, q in zip(log_p, log_q, strict=True))
        total += (1 - weight) * -log_softmax(student)[target] + weight * temperature**2 * divergence
    return total / len(targets)


@pytest.mark.parametrize(
    ("dtype", "weight", "temperature", "scale"),
    covering(
        [torch.float64, torch.float32, torch.bfloat16, torch.float16], [0, 0.3, 0.9, 1], [0.5, 1, 4.0, 20], [1, 30]
    ),
)
def test_it_is_hintons_formula(dtype, weight, temperature, scale):
    """Logits of half precision are converted, under autocast too, so that only their own rounding is lost."""
    ours, theirs, targets = logits(scale=scale, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float64):
        found = distillation_loss(ours, theirs, targets, weight=weight, temperature=temperature)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = torch.tensor(formula(ours, theirs, targets, weight, temperature), dtype=torch.float64)
    torch.testing.assert_close(found, expected.to(found.dtype))


@pytest.mark.parametrize(("weight", "temperature"), [(0.9, 4.0), (1.0, 0.5)])
def test_its_gradient_is_that_of_finite_differences_and_the_teacher_has_none(weight, temperature):
    ours, theirs, targets = logits()
    theirs.requires_grad_(True)

    def of_the_student(student):
        return distillation_loss(student, theirs, targets, weight=weight, temperature=temperature)

    assert torch.autograd.gradcheck(of_the_student, ours.requires_grad_(True))
    of_the_student(ours).backward()
    assert theirs.grad is None


OURS, THEIRS, TARGETS = logits()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"logits": [[0.0]]}, TypeError, "logits: expected a tensor, got list"),
        ({"logits": OURS[0]}, ValueError, r"logits: expected a shape \(N, classes\), got \(5,\)"),
        ({"teacher_logits": None}, TypeError, "teacher_logits: expected a tensor, got NoneType"),
        ({"teacher_logits": THEIRS[:, :1]}, ValueError, r"teacher_logits: .* \(7, 5\), got \(7, 1\)"),
        ({"targets": TARGETS.float()}, TypeError, "targets: expected int64, got torch.float32"),
        ({"targets": TARGETS[:1]}, ValueError, r"targets: expected a shape \(7,\), got \(1,\)"),
        ({"weight": 1.1}, ValueError, r"weight: expected a number in \[0, 1\], got 1.1"),
        ({"temperature": 0}, ValueError, "temperature: expected more than 0, got 0"),
    ],
    ids=lambda value: str(*value) if isinstance(value, dict) else "",
)
def test_bad_input_is_named(change, error, said):
    arguments = {"logits": OURS, "teacher_logits": THEIRS, "targets": TARGETS} | change
    with pytest.raises(error, match=f"^{said}"):
        sparsity.distillation_loss(**arguments)


@pytest.mark.parametrize("weight", [0, 0.5])
def test_classes_that_the_teacher_rules_out_add_nothing(weight):
    """The other classes alone, of which ours may rule out the same one."""
    ours, theirs, _ = logits()
    targets = torch.tensor([0, 1, 2, 4, 0, 1, 2])
    theirs[:, 3] = -torch.inf
    assert distillation_loss(ours, theirs, targets, weight=weight).isfinite()
    ours[:, 3] = -torch.inf
    found = distillation_loss(ours.requires_grad_(), theirs, targets, weight=weight)
    others = [0, 1, 2, 4]
    alone = distillation_loss(ours.detach()[:, others], theirs[:, others], targets.clamp(max=3), weight=weight)
    torch.testing.assert_close(found, alone)
    assert torch.autograd.grad(found, ours)[0].isfinite().all()
