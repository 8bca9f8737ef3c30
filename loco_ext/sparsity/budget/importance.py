"""Importance of filters and of their rings: what a network loses without them."""

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from loco_ext.reference.dtypes import compute_dtype
from loco_ext.sparsity.budget.structure import PrunableLayer, Structure
from loco_ext.sparsity.compaction.roles import has_running_statistics
from loco_ext.sparsity.compaction.whole_filters import by_taps, filters_first

Loss = Callable[[Any, Any], Tensor]
OfRings = Callable[[str, Tensor], Tensor]  # importance of each ring of each filter, (C_out, rings)


def by_norm(structure: Structure) -> dict[str, Tensor]:
    """Return, for each choice of each filter, the share of the layer's squared weights that it loses.

    Weights count as batch norms behind the layer scale them.
    """
    return {layer.name: _cumulated(_squares(layer)) for layer in structure.layers}


def by_function(structure: Structure, function: OfRings) -> dict[str, Tensor]:
    """Return the importance that each choice loses, given a function for the importance of a layer's rings.

    Raises:
        TypeError: its result is no tensor.
        ValueError: its result has another shape than ``(C_out, rings)``, or numbers that are negative or not finite.
    """
    found = {}
    for layer in structure.layers:
        given = function(layer.name, layer.weight.detach())
        try:
            each = torch.as_tensor(given).detach().double()
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"importance: expected a tensor for {layer.name!r}, got {type(given).__name__}") from None
        expected = len(layer.weight), len(layer.taps) - 1
        if tuple(each.shape) != expected or not bool((each.isfinite() & (each >= 0)).all()):
            numbers = f", from {each.min().item():g} to {each.max().item():g}" if each.numel() else ""
            raise ValueError(
                f"importance: expected finite numbers of at least 0 of shape {expected} for {layer.name!r}, got shape "
                f"{tuple(each.shape)}{numbers}"
            )
        found[layer.name] = _cumulated(each)
    return found


class Taylor:
    """First-order changes of the loss, as root mean squares over batches.

    A filter's is that of the output of the norm behind it, if there is one: ``gamma dL/dgamma + beta dL/dbeta``, summed
    over the norms if each call of the layer has its own, or if several read the filter's channel behind concatenations.
    Else it is the sum of ``w dL/dw`` over its weights, as for rings. That sum is zero if the norm has no weights, or
    frozen ones, and normalises by what it is given, which cancels the filter's length; then it is the root of the sum
    of squares. Filters of one group have equal parts of the group's change.

    Source:
        Molchanov et al., "Importance Estimation for Neural Network Pruning" (2019), eqs. 8 and 11.
    """

    def __init__(self, structure: Structure) -> None:
        self._layers = structure.layers
        self._removed_taps = [_removed_taps(layer) for layer in structure.layers]
        self._norms = [[(norm, torch.from_numpy(where)) for norm, where in layer.scales] for layer in structure.layers]
        self._shapes = {layer.name: (len(layer.weight), len(layer.taps)) for layer in structure.layers}
        self._with_gradient: set[str] = set()
        device = structure.layers[0].module.weight.device
        self._sums = torch.zeros(sum(map(prod, self._shapes.values())), dtype=torch.float64, device=device)
        self._any = torch.zeros((), dtype=torch.bool, device=device)  # whether any changes have been added

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients :meth:`add` reads."""
        owners = [layer.module for layer in self._layers] + [norm for scales in self._norms for norm, _ in scales]
        tensors = (p for module in dict.fromkeys(owners) for p in (module.weight, getattr(module, "bias", None)))
        return [p for p in tensors if p is not None]

    @torch.no_grad()
    def add(self, gradient: Callable[[nn.Parameter], Tensor | None], decay: float = 1.0) -> None:
        """Add the squared changes for one batch's gradients, after multiplying what was there by ``decay``.

        Frozen layers keep what they had, and all layers do if the changes are not all finite. Without synchronisation.
        """
        changes = []
        for layer, removed, norms in zip(self._layers, self._removed_taps, self._norms, strict=True):
            given = gradient(layer.module.weight)
            if given is None:
                changes.append(removed.new_zeros(self._shapes[layer.name]))
                continue
            self._with_gradient.add(layer.name)
            given = filters_first(layer.module, _widened(given))
            products = by_taps(layer.weight * given).sum(1)
            changes.append(products @ removed.to(products))
            scales = [(norm, where, _product(norm.weight, gradient, where)) for norm, where in norms]
            scaled = [(norm, where, product) for norm, where, product in scales if product is not None]
            if scaled:
                changes[-1][:, -1] = sum(product for *_, product in scaled)
            elif any(_normalises_by_batch(norm) for norm, _ in norms):
                changes[-1][:, -1] = (layer.weight * given).flatten(1).norm(dim=1)
            owners: list[Any] = [(norm, where) for norm, where, _ in scaled]
            for owner, where in owners or [(layer.module, None)]:  # the layer's too if the norms are frozen
                shift = _product(getattr(owner, "bias", None), gradient, where)
                if shift is not None:
                    changes[-1][:, -1] += shift
            if (groups := getattr(layer.module, "groups", 1)) > 1:  # each of which goes as a whole
                of_groups = changes[-1][:, -1].view(groups, -1)
                changes[-1][:, -1] = of_groups.mean(1, keepdim=True).expand_as(of_groups).flatten()
        squares = torch.cat([each.flatten().to(self._sums.device) for each in changes]).double().square()
        finite = squares.isfinite().all()
        self._any |= finite
        before = self._tables()
        self._sums = torch.where(finite, self._sums * decay + squares, self._sums)
        for layer in self._layers:
            if not layer.module.weight.requires_grad:
                self._tables()[layer.name].copy_(before[layer.name])

    def known(self) -> bool:
        """Return whether any changes have been added."""
        return bool(self._any)

    def has_nonzero(self) -> bool:
        """Return whether any change has been other than zero."""
        return bool(self._sums.any())

    def has_overflowed(self) -> bool:
        """Return whether there were gradients, but never such that all were finite."""
        return bool(self._with_gradient) and not self.known()

    def unknown(self) -> list[str]:
        """Return the names of layers that may shrink but have had no finite gradient; of all, if all were zero."""
        known = self._with_gradient if self.has_nonzero() else set()
        return [layer.name for layer in self._layers if not layer.kept and layer.name not in known]

    def state(self) -> dict[str, Tensor]:
        """Return the sums by the layer's name, for layers that have any."""
        return {
            name: sums.clone() for name, sums in self._tables().items() if self._any and name in self._with_gradient
        }

    def load(self, sums: Mapping[str, Tensor]) -> None:
        """Replace the sums by those of :meth:`state`; raise ValueError if they are another model's."""
        for name, each in sums.items():
            if self._shapes.get(name) != tuple(each.shape):
                raise ValueError(
                    f"state: expected importance of shapes {self._shapes}, got {tuple(each.shape)} for {name!r}"
                )
        self._with_gradient = set(sums)
        self._any.fill_(bool(sums))
        for name, mine in self._tables().items():
            mine.copy_(sums[name]) if name in sums else mine.zero_()

    def lost(self) -> dict[str, Tensor]:
        """Return the importance that each choice of a filter loses, ``(C_out, choices)``, by layer, on any scale."""
        return {name: sums.cummax(1).values.sqrt() for name, sums in self._tables().items()}

    def _tables(self) -> dict[str, Tensor]:
        """Return views of the sums, ``(C_out, choices)``, by the layer's name."""
        parts = self._sums.split([prod(shape) for shape in self._shapes.values()])
        return {name: part.view(shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)}


def _product(
    parameter: nn.Parameter | None, gradient: Callable[[nn.Parameter], Tensor | None], where: Tensor | None
) -> Tensor | None:
    """Return a parameter times its gradient, at some places or at all; None if it has none."""
    given = None if parameter is None else gradient(parameter)
    if parameter is None or given is None:
        return None
    product = parameter * _widened(given)
    return product if where is None else product[where.to(given.device)]


def _widened(gradient: Tensor) -> Tensor:
    """Return a gradient of half precision in float32: its products with weights may be too small for float16."""
    return gradient.to(compute_dtype(gradient.dtype))


def _normalises_by_batch(norm: Any) -> bool:
    """Return whether a norm uses the mean and variance of what it is given, not running ones."""
    return norm.training or not has_running_statistics(norm)


def by_taylor(
    structure: Structure, model: Callable[[Any], Any], batches: Iterable[Any], loss: Loss
) -> dict[str, Tensor]:
    """Return :class:`Taylor`'s importance, from the gradients of a model in its present mode.

    Args:
        model: called with the inputs of a batch.
        batches: pairs of inputs and targets.
        loss: function of the model's output and the targets.

    Raises:
        TypeError: the batches are no pairs, or the loss returns no scalar with a gradient.
        ValueError: the model or the loss fails for a batch, or no batch's gradients are finite, or all are zero.
    """
    taylor = Taylor(structure)
    parameters = taylor.parameters()
    required = [parameter.requires_grad for parameter in parameters]
    batch = None
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        for batch in batches:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise TypeError(f"batches: expected pairs of inputs and targets, got {type(batch).__name__}")
            given = torch.autograd.grad(_value(model, batch, loss), parameters, allow_unused=True)
            taylor.add(dict(zip(parameters, given, strict=True)).get)
    finally:
        for parameter, was in zip(parameters, required, strict=True):
            parameter.requires_grad_(was)
    if batch is None:
        raise ValueError("batches: expected at least one pair of inputs and targets for importance='taylor', got none")
    if not taylor.known():
        raise ValueError("batches: expected some for which all gradients of the loss are finite, got none")
    if not taylor.has_nonzero():
        raise ValueError("batches: expected some that depend on the weights, got gradients that are all zero")
    return taylor.lost()


def _value(model: Callable[[Any], Any], batch: Any, loss: Loss) -> Tensor:
    """Return the loss of a batch; an error of the model or the loss becomes one that names the batches."""
    try:
        with torch.enable_grad():
            x, target = tree_map_only(Tensor, lambda each: each.clone() if each.is_inference() else each, tuple(batch))
            value = loss(model(x), target)
    except Exception as error:
        raise ValueError(f"batches: expected inputs of the model and targets of the loss, got {error!r}") from error
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"loss: expected a function that returns a scalar with a gradient, got {got}")
    return value


def _removed_taps(layer: PrunableLayer) -> Tensor:
    """Return which taps each choice lacks, ``(taps, choices)``, as numbers of the weight's type."""
    rings = torch.from_numpy(layer.rings)
    return (rings[:, None] < torch.arange(len(layer.taps))).to(layer.module.weight)


def _squares(layer: PrunableLayer) -> Tensor:
    """Return the sum of squares of each ring of each filter, ``(C_out, rings)``, scaled to a sum of 1."""
    squares = by_taps(layer.weight.detach().double().square()).sum(1)
    if layer.norms and all(map(has_running_statistics, layer.norms)):
        squares = squares * torch.stack([*map(_squared_scale, layer.norms)]).sum(0)[:, None]
    rings = torch.from_numpy(layer.rings).to(squares.device)
    found = squares.new_zeros(len(squares), len(layer.taps) - 1).index_add_(1, rings, squares)
    total = found.sum()
    if not total.isfinite():
        raise ValueError(f"model: expected finite weights, got others in {layer.name!r} or the batch norm behind it")
    return found / total if total > 0 else found


def _squared_scale(norm: Any) -> Tensor:
    """Return the squares of the factors, by running statistics, that a norm multiplies the channels by."""
    scale = (norm.running_var.double() + norm.eps).reciprocal()
    return scale if norm.weight is None else scale * norm.weight.detach().double().square()


def _cumulated(of_rings: Tensor) -> Tensor:
    """Return the importance that each choice loses; rings are removed from the outside in."""
    return torch.nn.functional.pad(of_rings.double().cumsum(1), (1, 0))
