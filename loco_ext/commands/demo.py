"""The command ``loco-ext demo``."""

from pathlib import Path
from typing import Annotated

import typer

from loco_ext.commands import Device, Out, Result, command, make_writable, writing_to
from loco_ext.option_parsers import MOST
from loco_ext.output import json_text


@command()
def run(
    *,
    out: Out = Path("runs"),
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the initial weights and the order.")] = 0,
    device: Device = "cpu",
    epochs: Annotated[int, typer.Option(min=1, max=MOST, help="Passes over the training samples.")] = 40,
) -> Result:
    """Train the same small network twice on handwritten digits, and show where in the filters the weights end up.

    One training has ordinary weight decay, the other one that promotes locality. A third loses half of its
    multiply-accumulates while it trains, and is compared with one of fewer channels that costs as much. The second
    network is then trained on with weights of their own for all positions. Takes a minute.
    """
    from loco_ext.experiments import demo

    make_writable(out)
    settings = demo.Settings(seed=seed, device=device, epochs=epochs)
    with writing_to(out):
        results = demo.run(settings, out)

    def show() -> None:
        demo.print_tables(results)
        print(f"Metrics, figure and checkpoints are in {out}")

    return Result(lambda: json_text(demo.to_dict(settings, results), indent=2), show)
