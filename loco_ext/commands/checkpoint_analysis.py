"""Implementation of ``loco-ext analyze``: statistics per checkpoint, factors over all of them, and the output files."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from loco_ext.analysis.conv_weights import conv_weights
from loco_ext.analysis.locality import LocalityStatistics, estimate_locality, locality_statistics
from loco_ext.analysis.tables import locality_table, statistics_table
from loco_ext.analysis.tap_figure import tap_figure
from loco_ext.experiments.records import provenance
from loco_ext.folders import owned
from loco_ext.foreign_checkpoints import CheckpointError, read_checkpoint
from loco_ext.output import one_line, replacing, write_json

_LONGEST_NOTE = 1000  # characters shown; analysis.json has the whole note


@dataclass(frozen=True)
class Analysis:
    """Result of ``analyze``: statistics by checkpoint, factors by layer, and notes on layers that were left out."""

    options: dict[str, Any]
    statistics: dict[str, LocalityStatistics]
    locality: dict[str, tuple[float, ...]]
    notes: list[str]
    mean_abs_weight: dict[str, Tensor]  # by layer, [*kernel_size], mean over all checkpoints

    def to_dict(self) -> dict[str, Any]:
        """Return data for JSON; ``loco-ext train --locality`` reads its entry "locality"."""
        return {
            "options": self.options,
            **provenance(),
            "statistics": {name: asdict(statistics) for name, statistics in self.statistics.items()},
            "locality": self.locality,
            "mean_abs_weight": {name: taps.tolist() for name, taps in self.mean_abs_weight.items()},
            "notes": self.notes,
        }


def analyze(paths: Sequence[Path], *, weighting: str, eta_rule: str, stat: str, c: float) -> Analysis:
    """Read the checkpoints and compute their statistics; for the options see :mod:`loco_ext.analysis.locality`.

    Raises:
        ValueError: a file cannot be read or has no convolution weights (:class:`CheckpointError`), or its layers
            differ from those of the first.
    """
    models = {str(path): read_checkpoint(path) for path in paths}
    found = {}
    for name, model in models.items():
        try:
            found[name] = conv_weights(model)
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from error
    statistics = {name: locality_statistics(model, weighting=weighting) for name, model in models.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        locality = estimate_locality(list(models.values()), c=c, eta_rule=eta_rule, stat=stat)
    notes = [str(warning.message) for warning in caught]
    notes += [f"{name}: not in the statistics: {', '.join(s.skipped)}" for name, s in statistics.items() if s.skipped]
    mean_abs_weight = {
        layer: torch.stack([weights[layer].abs().mean((0, 1)) for weights in found.values()]).mean(0)
        for layer in locality
    }
    return Analysis(
        options={"weighting": weighting, "eta_rule": eta_rule, "stat": stat, "c": c},
        statistics=statistics,
        locality=locality,
        notes=notes,
        mean_abs_weight=mean_abs_weight,
    )


def save(analysis: Analysis, out: Path) -> None:
    """Write analysis.json and taps.png to the folder ``out``."""
    with owned(out):
        with replacing(out / "taps.png") as temporary, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # matplotlib draws a box for such a glyph
            tap_figure(analysis.mean_abs_weight).savefig(temporary, format="png", dpi=150)
        write_json(out / "analysis.json", analysis.to_dict())


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Return the shortest unique ending of every path, without the file suffix.

    >>> list(short_names(["runs/a/model.pt", "runs/b/model.pt", "runs/b/last.pt", "x/runs/b/model.pt"]).values())
    ['a/model', 'runs/b/model.pt', 'last', 'x/runs/b/model']
    """
    names = {}
    for path in paths:
        parts = Path(path).with_suffix("").parts
        ends = ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        others = [str(Path(other).with_suffix("")) for other in paths if other != path]
        names[path] = next((end for end in ends if not any(f"/{o}".endswith(f"/{end}") for o in others)), path)
    return names


def show(analysis: Analysis) -> None:
    """Print the tables, followed by the notes."""
    console = Console()
    labels = short_names(list(analysis.statistics))
    named = {labels[name]: statistics for name, statistics in analysis.statistics.items()}
    console.print(statistics_table(named))
    console.print(locality_table(analysis.locality, "Suggested factors of the decay by distance from the centre"))
    for note in analysis.notes:
        console.print(Text(one_line(note, _LONGEST_NOTE)))
