"""The command ``loco-ext demo``."""

from pathlib import Path
from typing import Annotated

import typer

from loco_ext.commands import Device, Out, Result, command, make_writable, writing_to
from loco_ext.folders import check_results
from loco_ext.option_parsers import MOST
from loco_ext.output import json_text


@command()
def run(
    *,
    out: Out = Path("runs"),
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the initial weights and of the order of samples.")
    ] = 0,
    device: Device = "cpu",
    epochs: Annotated[int, typer.Option(min=1, max=MOST, help="Number of passes over the training samples.")] = 40,
) -> Result:
    """Train small networks on handwritten digits: one of half the MACs, one with locality, one without weight sharing.

    The first has ordinary weight decay. One that loses half of its multiply-accumulates (MACs) during training is
    compared with it and with a narrower network of equal cost. Another has decay that promotes locality; where in the
    filters its weights end up is shown, and it is trained further with separate weights at every position. All of this
    takes a minute.
    """
    from loco_ext.experiments import demo

    check_results(out, ("demo.json",))
    make_writable(out)
    settings = demo.DemoSettings(seed=seed, device=device, epochs=epochs)
    with writing_to(out):
        results = demo.run(settings, out)

    def show() -> None:
        demo.print_tables(results)
        print(f"Metrics, figure and checkpoints are in {out}")

    return Result(lambda: json_text(demo.to_dict(settings, results), indent=2), show)
