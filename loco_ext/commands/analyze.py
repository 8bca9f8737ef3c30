"""The command ``loco-ext analyze``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from loco_ext.commands import Out, Result, command, make_writable, writing_to
from loco_ext.errors import UserError
from loco_ext.output import json_text, one_line


@command()
def run(
    checkpoints: Annotated[
        list[Path], typer.Argument(help="Weights: safetensors files, or torch files of weights only.")
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
    from loco_ext.commands import checkpoint_analysis as analyzing

    try:
        analysis = analyzing.analyze(checkpoints, weighting=weighting, eta_rule=eta_rule, stat=stat, c=c)
    except ValueError as error:
        raise UserError(str(error)) from error
    make_writable(out)
    with writing_to(out):
        analyzing.save(analysis, out)

    def show() -> None:
        analyzing.show(analysis)
        print(f"analysis.json, for `loco-ext train --locality`, and taps.png are in {one_line(str(out))}")

    return Result(lambda: json_text(analysis.to_dict(), indent=2), show)
