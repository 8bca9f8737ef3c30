"""The interface of a penalty to the optimizers and their checkpoints."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from loco_ext.ops import LayerPenalty, StepPenalty


@dataclass(frozen=True)
class Penalty(ABC):
    """Base class of all penalties, which are frozen dataclasses that hold the penalty's settings.

    A checkpoint holds only the settings. To load those of a class of your own, the optimizer must have a penalty of
    this class in the same place.

    Example:
        >>> from loco_ext import sparsity
        >>> isinstance(sparsity.RingPenalty(1e-3), sparsity.Penalty)
        True
    """

    # The field that checkpoints store; the others, such as modules, come from the optimizer that loads the checkpoint.
    # None: all fields are stored.
    _stored: ClassVar[str | None] = None

    @abstractmethod
    def value(self, weight: Tensor) -> Tensor:
        """Return the penalty of one layer's weight: float64 scalar, differentiable."""

    @abstractmethod
    def for_step(self, weight: Tensor) -> StepPenalty | LayerPenalty | None:
        """Return the argument that the optimizer step's operators take for this weight, None if they take none.

        Raises:
            TypeError, ValueError: the penalty does not fit the weight.
        """

    def to_plain(self) -> tuple[Any, ...]:
        """Return the class name and the settings, as checkpoints store them; loading them runs no code."""
        if self._stored is not None:
            return (type(self).__name__, getattr(self, self._stored).to_plain())
        return (type(self).__name__, *(getattr(self, each.name) for each in fields(self)))
