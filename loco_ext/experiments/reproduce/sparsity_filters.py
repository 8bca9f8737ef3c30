"""Pictures of trained filters and their correlations, which the structured-sparsity draft announces."""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from loco_ext.analysis.conv_weights import conv_weights
from loco_ext.experiments.figures import write
from loco_ext.foreign_checkpoints import read_checkpoint

SHOWN = 16  # filters in a row


def correlations(path: Path) -> list[float]:
    """Return the mean over layers, the least and the greatest of :func:`mean_correlation`."""
    found = [mean_correlation(weight) for weight in _layers(path)]
    return [sum(found) / len(found), min(found), max(found)]


def mean_correlation(weight: Tensor) -> float:
    """Return the mean magnitude of the correlation over pairs of filters [C_out, ...]; 0 for filters of one value.

    >>> round(mean_correlation(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]]).view(3, 1, 1, 2)), 3)
    1.0
    """
    centred = weight.double().flatten(1)
    centred = centred - centred.mean(1, keepdim=True)
    units = torch.nn.functional.normalize(centred)
    pairs = (units @ units.T).abs()
    count = len(pairs)
    return ((pairs.sum() - pairs.trace()) / max(count * (count - 1), 1)).item()


def save(networks: dict[str, dict[float, Path]], out: Path) -> None:
    """Draw filters of the first layer, means over channels, a row for each penalty and strength."""
    rows = [(f"{penalty}, {a:.2g}", path) for penalty, found in networks.items() for a, path in found.items()]
    figure = Figure(figsize=(0.7 * SHOWN, 0.95 * len(rows)), layout="constrained")
    for line, (title, path) in zip(figure.subplots(len(rows), SHOWN, squeeze=False), rows, strict=True):
        filters = _layers(path)[0].float().mean(1)
        for axes, taps in zip(line, filters, strict=False):
            largest = taps.abs().max().item() or 1.0
            axes.imshow(taps.numpy(), cmap="RdBu", vmin=-largest, vmax=largest)
        for axes in line:
            axes.set_axis_off()
        line[0].set_title(title, size="small", loc="left")
    write(figure, out)


def _layers(path: Path) -> list[Tensor]:
    return list(conv_weights(read_checkpoint(path)).values())
