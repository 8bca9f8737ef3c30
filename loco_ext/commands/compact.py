"""The command ``loco-ext compact``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from loco_ext.commands import (
    Data,
    Device,
    Out,
    Result,
    TrainedData,
    TrainedModel,
    TrainedPath,
    command,
    make_writable,
    writing_to,
)
from loco_ext.option_parsers import MOST
from loco_ext.output import json_text, status


@command()
def run(
    trained: TrainedPath,
    *,
    model: TrainedModel = None,
    data: TrainedData = None,
    folder: Data = None,
    out: Out = Path("runs/compact"),
    batch_size: Annotated[
        int, typer.Option(min=1, max=MOST, help="Number of images per batch for which speed is measured.")
    ] = 64,
    cost: Annotated[
        Literal["measured", "macs"],
        typer.Option(
            help="Compute each layer in the way that is measured to be fastest, or in that of the fewest MACs."
        ),
    ] = "measured",
    fold_norms: Annotated[
        bool,
        typer.Option(
            help="Fold batch normalisations into the convolutions before them.  [default: yes]", show_default=False
        ),
    ] = True,
    onnx: Annotated[bool, typer.Option("--onnx", help="Also write model.onnx.")] = False,
    device: Device = "cpu",
) -> Result:
    """Remove filters, rings of filters and channels that are zero from a network, and write what remains to a folder.

    The smaller network has the same outputs. The command prints its MACs, its measured latency and, if the data set is
    available, its accuracy.
    """
    from loco_ext.experiments import compacting

    found = compacting.read_trained(trained, model, data)
    dataset = found.load_data(folder)
    compacting.check_folder(out)
    make_writable(out)
    with status("loco_ext.sparsity.compaction"):
        compacted = compacting.compact(
            found, batch_size=batch_size, cost=cost, fold_norms=fold_norms, dataset=dataset, device=device
        )
    with writing_to(out):
        compacting.save(compacted, found, out, onnx=onnx)

    def show() -> None:
        print(compacted.report)
        if compacted.accuracy_before is not None:
            print(f"test accuracy {compacted.accuracy_before:.2%} -> {compacted.accuracy_after:.2%}")
        print(f"The smaller network and its report are in {out}")

    return Result(lambda: json_text(compacted.to_dict()), show)
