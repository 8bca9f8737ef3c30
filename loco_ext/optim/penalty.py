"""Conversion of a parameter group's ``penalty`` to the penalties that the step takes for each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any, TypeAlias

from torch import Tensor

from loco_ext.ops.penalties import OfStep
from loco_ext.optim.locality import looks_like_convolution
from loco_ext.sparsity.complexity import ComplexityPenalty, Penalty
from loco_ext.sparsity.penalties import FoldedPenalty, KernelPenalty, RingPenalty

# (a convolution's weight, its penalty, the penalty's weights of groups on the weight's device)
Folded: TypeAlias = tuple[Tensor, FoldedPenalty, Tensor]
_CLASSES = {"RingPenalty": RingPenalty, "KernelPenalty": KernelPenalty}


def as_plain(penalty: Any) -> Any:
    """Return a group's penalty as checkpoints store it: tuples of class name and settings, loadable without code.

    The batch norm of a FoldedPenalty and the model of a ComplexityPenalty are left out.
    """
    if isinstance(penalty, list):
        return [as_plain(entry) for entry in penalty]
    if isinstance(penalty, FoldedPenalty):
        return ("FoldedPenalty", as_plain(penalty.penalty))
    if isinstance(penalty, ComplexityPenalty):
        return ("ComplexityPenalty", as_plain(penalty.rings))
    return penalty if penalty is None else (type(penalty).__name__, *astuple(penalty))


def from_plain(penalty: Any, present: Any = None) -> Any:
    """Return the penalty that :func:`as_plain` was given; tuples may have become lists.

    Args:
        penalty: the plain form, or already a penalty.
        present: the group's penalty so far, which supplies the batch norms of FoldedPenalty entries and the models of
            ComplexityPenalty entries.

    Raises:
        ValueError: ``present`` has no penalty of the same kind in the place of such an entry.
    """
    if not isinstance(penalty, list | tuple):
        return penalty
    if penalty and isinstance(penalty[0], str):
        name, *settings = penalty
        if name == "FoldedPenalty":
            return _folded(from_plain(settings[0]), present)
        if name == "ComplexityPenalty":
            return _of_model(from_plain(settings[0]), present)
        if name not in _CLASSES:
            return penalty
        if name == "RingPenalty":
            return RingPenalty(*settings[:-1], first=settings[-1])
        return KernelPenalty(*settings)
    places = present if isinstance(present, list) and len(present) == len(penalty) else [None] * len(penalty)
    return [from_plain(entry, place) for entry, place in zip(penalty, places, strict=True)]


def _folded(penalty: Any, present: Any) -> FoldedPenalty:
    if not isinstance(present, FoldedPenalty):
        raise ValueError(
            "penalty: expected an optimizer with a FoldedPenalty where the checkpoint has one, as that does not hold "
            f"batch norms, got {present!r}"
        )
    return FoldedPenalty(penalty, present.batch_norm)


def _of_model(rings: Any, present: Any) -> ComplexityPenalty:
    if not isinstance(present, ComplexityPenalty):
        raise ValueError(
            "penalty: expected an optimizer with a ComplexityPenalty where the checkpoint has one, as that does not "
            f"hold the model, got {present!r}"
        )
    return replace(present, rings=rings)


def step_penalties(
    params: Sequence[Tensor], penalty: Penalty | list[Penalty | None] | None
) -> tuple[list[OfStep | None], list[Folded]]:
    """Return the penalties that the operators take, and the parameters with a FoldedPenalty.

    The first list has an entry for each parameter, None for those without a penalty, and is empty if no parameter has
    one. The optimizers themselves apply a FoldedPenalty after the step.

    A single penalty applies to the parameters that look like convolution weights, as a locality does; a list gives each
    parameter its own.

    Raises:
        TypeError, ValueError: ``penalty`` is neither, fits no parameter, or an entry does not fit its parameter.
    """
    if penalty is None:
        return [], []
    of_step: list[OfStep | None] = []
    folded: list[Folded] = []
    for i, (param, entry) in enumerate(zip(params, _entries(params, penalty), strict=True)):
        try:
            if isinstance(entry, FoldedPenalty):
                entry.check(param)
                folded.append((param, entry, entry.penalty.group_weights(param).to(param.device)))
            of_step.append(None if entry is None or isinstance(entry, FoldedPenalty) else entry.for_step(param))
        except (TypeError, ValueError) as error:
            raise type(error)(f"penalty of parameter {i}: {error}") from None
    return (of_step if any(entry is not None for entry in of_step) else []), folded


def _entries(params: Sequence[Tensor], penalty: Any) -> Sequence[Penalty | None]:
    if isinstance(penalty, list):
        if len(penalty) != len(params):
            raise ValueError(f"penalty: expected a list of {len(params)} entries, one a parameter, got {len(penalty)}")
        for i, entry in enumerate(penalty):
            check_penalty(f"penalty[{i}]", entry)
        return penalty
    check_penalty("penalty", penalty)
    entries = [penalty if looks_like_convolution(param) else None for param in params]
    if params and not any(entries):
        raise ValueError(
            "penalty: expected a group with convolution weights (3 to 5 dimensions, sizes up to 15, more than one "
            f"tap), got shapes {[tuple(param.shape) for param in params[:4]]}; a list names each its own"
        )
    return entries


def check_penalty(name: str, penalty: object) -> None:
    """Raise TypeError unless ``penalty`` is a penalty or None."""
    if penalty is not None and not isinstance(penalty, Penalty):
        raise TypeError(f"{name}: expected None, a RingPenalty or another of loco_ext.sparsity, got {penalty!r}")
