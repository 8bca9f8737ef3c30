"""Report on the results of :func:`loco_ext.sparsity.compact`, for people and for programs."""

from dataclasses import asdict, dataclass, field
from typing import Any

from loco_ext.sparsity.former_names import FormerNames

_NAMED = 4  # names listed of those that share a reason


@dataclass
class LayerReport(FormerNames):
    """Report on one convolution or linear layer.

    Args:
        name: name of the module in the model.
        filters_before, filters_after: number of output channels, and of those with a non-zero weight.
        channels_before, channels_after: number of input channels that a filter reads.
        kernel_size: size in the model.
        sizes: number of filters of each size after compaction, from "3x3" to "0".
        convolutions: sizes of the convolutions that compute the layer after compaction, with their numbers of filters.
        identity_filters: number of filters with a single weight, at the centre tap, which copy a channel (eq. 24).
        macs_before, macs_after: multiply-accumulates of all calls for one sample, by eq. 10 of the draft, with the
            sizes above.
        macs_executed: number that the convolutions of the smaller network compute for one sample.
        kept: reasons why filters without a non-zero weight were kept.

    Example:
        >>> import torch
        >>> from loco_ext import sparsity
        >>> _, report = sparsity.compact(torch.nn.Conv2d(1, 2, 3), torch.zeros(1, 1, 5, 5), cost="macs")
        >>> isinstance(report.layers[0], sparsity.LayerReport), report.layers[0].sizes
        (True, {'3x3': 2})
    """

    name: str
    filters_before: int
    filters_after: int
    channels_before: int
    channels_after: int
    kernel_size: str
    sizes: dict[str, int]
    convolutions: list[tuple[str, int]]
    identity_filters: int
    macs_before: int
    macs_after: int
    macs_executed: int
    kept: str | None = None


@dataclass
class Report(FormerNames):
    """Report on the compaction of a model.

    Args:
        layers: reports on the layers, in the order in which they run.
        notes: reasons why something was kept as it is, by the name of the module or operation.
        parameters_before, parameters_after: numbers of parameters.
        macs_elsewhere: multiply-accumulates of all other operations for one sample, as torch counts them: layers
            whose weights code computes, products of tensors. They count as unchanged.
        latency_before, latency_after: median seconds of a forward pass on the example; None if not measured.

    Example:
        >>> import torch
        >>> from loco_ext import sparsity
        >>> _, report = sparsity.compact(torch.nn.Conv2d(1, 2, 3), torch.zeros(1, 1, 5, 5), cost="macs")
        >>> report.macs_before, report.to_dict()["parameters_after"]
        (162, 20)
    """

    layers: list[LayerReport] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    parameters_before: int = 0
    parameters_after: int = 0
    latency_before: float | None = None
    latency_after: float | None = None
    macs_elsewhere: int = 0

    @property
    def macs_before(self) -> int:
        """MACs of the model for one sample."""
        return self.macs_elsewhere + sum(layer.macs_before for layer in self.layers)

    @property
    def macs_after(self) -> int:
        """MACs for one sample by eq. 10, each filter with its own size and the remaining channels."""
        return self.macs_elsewhere + sum(layer.macs_after for layer in self.layers)

    @property
    def macs_executed(self) -> int:
        """MACs for one sample that the smaller network executes; it may merge filter sizes where that is faster."""
        return self.macs_elsewhere + sum(layer.macs_executed for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as numbers, strings, lists and dicts."""
        totals = ("macs_before", "macs_after", "macs_executed")
        return {**asdict(self), **{name: getattr(self, name) for name in totals}}

    def __str__(self) -> str:
        lines = [f"{'layer':24} {'filters':>12} {'channels':>12} {'MACs':>28}  sizes"]
        for layer in self.layers:
            sizes = ", ".join(f"{count} of {size}" for size, count in layer.sizes.items())
            lines.append(
                f"{layer.name:24} {layer.filters_before:>5} -> {layer.filters_after:<4}"
                f" {layer.channels_before:>4} -> {layer.channels_after:<4}"
                f" {layer.macs_before:>13,} -> {layer.macs_after:<12,}  {sizes}"
            )
            if layer.kept:
                lines.append(f"{'':24} kept: {layer.kept}")
        if self.macs_elsewhere:
            lines.append(f"{'elsewhere':24} {'':12} {'':12} {self.macs_elsewhere:>13,} -> {self.macs_elsewhere:<12,}")
        lines += self._summed_up()
        lines.append(f"MACs {self.macs_before:,} -> {self.macs_after:,}")
        lines.append(f"parameters {self.parameters_before:,} -> {self.parameters_after:,}")
        if self.latency_before is not None and self.latency_after is not None:
            lines.append(f"latency {self.latency_before * 1e3:.3f} ms -> {self.latency_after * 1e3:.3f} ms")
        return "\n".join(lines)

    def _summed_up(self) -> list[str]:
        """Return a line for each reason among the notes, with the first names that it holds for."""
        names: dict[str, list[str]] = {}
        for name, reason in self.notes.items():
            names.setdefault(reason, []).append(name)
        return [f"{_listed(found)}: {reason}" for reason, found in names.items()]


def _listed(names: list[str]) -> str:
    more = ", ..." if len(names) > _NAMED else ""
    return names[0] if len(names) == 1 else f"{len(names)} operations ({', '.join(names[:_NAMED])}{more})"
