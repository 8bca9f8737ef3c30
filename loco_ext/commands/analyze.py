"""The command ``loco-ext analyze``."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from loco_ext.commands import Out, Result, command, make_writable, writing_to
from loco_ext.folders import owned
from loco_ext.output import json_text, one_line, print_table, write_json

_LONGEST_NOTE = 1000  # characters shown; analysis.json has the whole note


@command()
def run(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(help="Weights: folders of trainings, safetensors files, or torch files of weights only."),
    ],
    *,
    out: Out = Path("runs/analysis"),
    weighting: Annotated[
        Literal["halves", "layers", "matrices"],
        typer.Option(
            help="What has equal weight in the statistics: the halves of the network, its layers, or its matrices."
        ),
    ] = "halves",
    eta_rule: Annotated[
        Literal["local", "paper"],
        typer.Option(help="Rule of the suggested factors: local; or paper, the rule as printed, which is inverted."),
    ] = "local",
    stat: Annotated[
        Literal["signed", "abs", "rms"],
        typer.Option(help="Estimate the factors from signed weights, magnitudes or root mean squares."),
    ] = "signed",
    c: Annotated[float, typer.Option("--c", min=0, help="How strongly the decay varies with the distance.")] = 1.5,
) -> Result:
    """Measure how weights change with the distance from the centre of their filter (LOCO-REG, Table 4).

    The command also suggests (gamma, eta) for every layer (Table 6). It averages over all checkpoints.
    """
    import torch

    from loco_ext.analysis.conv_weights import conv_weights
    from loco_ext.analysis.locality import estimate_locality, locality_statistics
    from loco_ext.analysis.tables import STATISTICS, locality_rows, statistics_rows
    from loco_ext.analysis.tap_figure import tap_figure
    from loco_ext.experiments.figures import write
    from loco_ext.experiments.records import provenance
    from loco_ext.experiments.run import WEIGHTS
    from loco_ext.experiments.settings import settings_errors
    from loco_ext.foreign_checkpoints import read_checkpoint

    models = {str(path): read_checkpoint(path / WEIGHTS if path.is_dir() else path) for path in checkpoints}
    weights = []
    for name, model in models.items():
        with settings_errors(f"{name}: "):
            weights.append(conv_weights(model))
    with settings_errors():
        statistics = {name: locality_statistics(model, weighting=weighting) for name, model in models.items()}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            locality = estimate_locality(list(models.values()), c=c, eta_rule=eta_rule, stat=stat)
    notes = [str(warning.message) for warning in caught]
    notes += [f"{name}: not in the statistics: {', '.join(s.skipped)}" for name, s in statistics.items() if s.skipped]
    taps = {layer: torch.stack([each[layer].abs().mean((0, 1)) for each in weights]).mean(0) for layer in locality}
    analysis = {
        "options": {"weighting": weighting, "eta_rule": eta_rule, "stat": stat, "c": c},
        **provenance(),
        "statistics": {name: asdict(each) for name, each in statistics.items()},
        "locality": locality,
        "mean_abs_weight": {name: each.tolist() for name, each in taps.items()},
        "notes": notes,
    }
    make_writable(out)
    with writing_to(out), owned(out):
        write(tap_figure(taps), out / "taps.png")
        write_json(out / "analysis.json", analysis)

    def show() -> None:
        labels = short_names(list(statistics))
        print_table(*statistics_rows({labels[name]: each for name, each in statistics.items()}), STATISTICS)
        print_table(*locality_rows(locality), "Suggested factors of the decay by distance from the centre")
        for note in notes:
            print(one_line(note, _LONGEST_NOTE))
        print(f"analysis.json, for `loco-ext train --locality`, and taps.png are in {one_line(str(out))}")

    return Result(lambda: json_text(analysis, indent=2), show)


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Return the shortest unique ending of every path, without the file suffix.

    >>> list(short_names(["runs/a/model.pt", "runs/b/model.pt", "runs/b/last.pt", "x/runs/b/model.pt"]).values())
    ['a/model', 'runs/b/model.pt', 'last', 'x/runs/b/model']
    """
    names = {}
    for path in paths:
        parts = _without_suffix(path).parts
        ends = ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        others = [str(_without_suffix(other)) for other in paths if other != path]
        names[path] = next((end for end in ends if not any(f"/{o}".endswith(f"/{end}") for o in others)), path)
    return names


def _without_suffix(path: str) -> Path:
    """Return the path of a folder, whose name may have dots, or that of a file without its suffix."""
    found = Path(path)
    return found if found.is_dir() else found.with_suffix("")
