"""A parameter group's ``penalty``: its form in checkpoints, and what the step takes for each parameter."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from torch import Tensor, distributed
from torch.nn import SyncBatchNorm

from loco_ext.ops.penalties import OfStep
from loco_ext.optim.locality import entries_of
from loco_ext.penalties import FoldedPenalty, KernelPenalty, Penalty, RingPenalty
from loco_ext.penalties.folded import FoldedLayer
from loco_ext.warning import warn_caller

_KINDS: dict[str, type[Penalty]] = {kind.__name__: kind for kind in (RingPenalty, KernelPenalty)}


def to_plain(option: Any) -> Any:
    """Return a group's locality or penalty as checkpoints store it, with numpy's numbers as Python's.

    See :meth:`loco_ext.sparsity.Penalty.to_plain`.
    """
    if isinstance(option, Penalty):
        option = option.to_plain()
    if isinstance(option, list | tuple):
        return type(option)(map(to_plain, option))
    return option.item() if isinstance(option, np.generic) else option


def from_plain(penalty: Any, present: Any = None) -> Any:
    """Return the penalty that :func:`to_plain` was given; tuples may have become lists.

    Args:
        penalty: the plain form, or already a penalty.
        present: the group's penalty so far, which supplies the class and the modules that a checkpoint does not hold.

    Raises:
        ValueError: ``present`` has no penalty of the same kind in the place of one that needs it.
    """
    if not isinstance(penalty, list | tuple):
        return penalty
    if not penalty or not isinstance(penalty[0], str):
        places = present if isinstance(present, list) and len(present) == len(penalty) else [None] * len(penalty)
        return [from_plain(entry, place) for entry, place in zip(penalty, places, strict=True)]
    name, *settings = penalty
    kind = type(present) if isinstance(present, Penalty) and type(present).__name__ == name else _KINDS.get(name)
    if kind is None:
        if not name.endswith(Penalty.__name__):
            return penalty
        raise ValueError(
            f"penalty: expected an optimizer with a {name} where the checkpoint has one, as that holds neither its "
            f"class nor its modules, got {present!r}"
        )
    if kind._stored is not None:
        return replace(present, **{kind._stored: from_plain(settings[0])})
    return kind(**dict(zip([each.name for each in fields(kind)], settings, strict=True)))


def step_penalties(
    params: Sequence[Tensor], penalty: Penalty | list[Penalty | None] | None
) -> tuple[list[OfStep | None], list[tuple[Tensor, FoldedLayer]]]:
    """Return the penalties that the operators take, and the parameters with a FoldedPenalty.

    The first list has an entry for each parameter, None for those without a penalty, and is empty if no parameter has
    one. The optimizers themselves apply a FoldedPenalty after the step.

    A single penalty applies to the parameters that look like convolution weights, as a locality does; a list gives each
    parameter its own. Warn if a FoldedPenalty depends on running variances that differ between processes.

    Raises:
        TypeError, ValueError: ``penalty`` is neither, fits no parameter, or an entry does not fit its parameter.
    """
    if penalty is None:
        return [], []
    of_step: list[OfStep | None] = []
    folded: list[tuple[Tensor, FoldedLayer]] = []
    for i, (param, entry) in enumerate(zip(params, _entries(params, penalty), strict=True)):
        try:
            of_step.append(None if entry is None else entry.for_step(param))
            if isinstance(entry, FoldedPenalty):
                folded.append((param, entry.layer(param)))
        except (TypeError, ValueError) as error:
            raise type(error)(f"penalty of parameter {i}: {error}") from None
    own = {type(layer.batch_norm).__name__ for _, layer in folded if not isinstance(layer.batch_norm, SyncBatchNorm)}
    if own and distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        warn_caller(
            "penalty: expected SyncBatchNorm behind the convolutions of a FoldedPenalty in several processes, got "
            f"{', '.join(sorted(own))}, whose running variances differ; weights then differ too, unless a hook before "
            "the step makes the variances equal"
        )
    return (of_step if any(entry is not None for entry in of_step) else []), folded


def _entries(params: Sequence[Tensor], penalty: Any) -> Sequence[Penalty | None]:
    entries = entries_of("penalty", penalty, params, check_penalty)
    if isinstance(penalty, Penalty) and params and not any(entries):
        raise ValueError(
            "penalty: expected a group with convolution weights (3 to 5 dimensions, sizes up to 15, more than one "
            f"tap), got shapes {[tuple(param.shape) for param in params[:4]]}; a list names each its own"
        )
    return entries


def check_penalty(name: str, penalty: object) -> None:
    """Raise TypeError unless ``penalty`` is a penalty or None."""
    if penalty is not None and not isinstance(penalty, Penalty):
        raise TypeError(f"{name}: expected None, a RingPenalty or another of loco_ext.sparsity, got {penalty!r}")
