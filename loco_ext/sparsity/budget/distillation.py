"""The loss that makes a smaller network learn the outputs of the network that it was made of."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loco_ext.argument_checks import check_number, check_tensor

WEIGHT, TEMPERATURE = 0.9, 4.0


def distillation_loss(
    logits: Tensor, teacher_logits: Tensor, targets: Tensor, *, weight: float = WEIGHT, temperature: float = TEMPERATURE
) -> Tensor:
    """Return a mix of the cross-entropy and the divergence from a teacher's softened probabilities.

    The mean over samples of ``(1 - weight) * CE(logits, targets) + weight * T**2 * KL(p || q)``, where ``p`` and ``q``
    are the softmax of the teacher's logits and of the logits over the temperature ``T``. The factor ``T**2`` keeps the
    size of the second term's gradients when the temperature changes.

    Args:
        logits: of the network that trains, ``(N, classes)``, of any floating-point dtype.
        teacher_logits: those of the teacher for the same samples; no gradient flows into them.
        targets: classes, ``(N,)``, int64.
        weight: in [0, 1]; 0 is only the cross-entropy.
        temperature: more than 0; high ones show the student how the teacher ranks the wrong classes.

    Returns:
        A scalar, computed in float32, or in float64 if the logits are.

    Raises:
        TypeError, ValueError: the message names the argument.

    Source:
        Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015), section 2.

    Example:
        >>> import torch
        >>> from loco_ext import sparsity
        >>> teacher, student = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        >>> x, target = torch.randn(8, 4), torch.randint(3, (8,))
        >>> with torch.no_grad():
        ...     teacher_logits = teacher(x)
        >>> sparsity.distillation_loss(student(x), teacher_logits, target, weight=0.5).backward()
    """
    _check(logits, teacher_logits, targets)
    if check_number("weight", weight) > 1:
        raise ValueError(f"weight: expected a number in [0, 1], got {weight!r}")
    if check_number("temperature", temperature) == 0:
        raise ValueError(f"temperature: expected more than 0, got {temperature!r}")
    both = logits, teacher_logits.detach()
    ours, theirs = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in both)
    correct = F.cross_entropy(ours, targets)
    if weight == 0:
        return correct
    log_q, log_p = (F.log_softmax(each / temperature, 1) for each in (ours, theirs))
    # A class that the teacher rules out, with a logit of minus infinity, adds nothing.
    divergence = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q)).sum() / len(ours)
    return (1 - weight) * correct + weight * temperature**2 * divergence


def _check(logits: Any, teacher_logits: Any, targets: Any) -> None:
    """Raise unless the logits are of the same samples and classes, and the targets of the same samples."""
    check_tensor("logits", logits, floating=True)
    check_tensor("teacher_logits", teacher_logits, floating=True)
    check_tensor("targets", targets)
    if targets.dtype != torch.int64:
        raise TypeError(f"targets: expected int64, got {targets.dtype}")
    if logits.dim() != 2:
        raise ValueError(f"logits: expected a shape (N, classes), got {tuple(logits.shape)}")
    if teacher_logits.shape != logits.shape:
        raise ValueError(
            f"teacher_logits: expected the shape of the logits, {tuple(logits.shape)}, got "
            f"{tuple(teacher_logits.shape)}"
        )
    if targets.shape != logits.shape[:1]:
        raise ValueError(f"targets: expected a shape ({len(logits)},), got {tuple(targets.shape)}")
