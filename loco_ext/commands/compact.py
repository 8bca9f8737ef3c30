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
        int, typer.Option(min=1, max=MOST, help="Images per batch on which the result is to be fast.")
    ] = 64,
    cost: Annotated[
        Literal["measured", "macs"], typer.Option(help="What decides how a layer is computed.")
    ] = "measured",
    fold_norms: Annotated[
        bool, typer.Option(help="Fold batch normalisations into the convolutions before them.", show_default="yes")
    ] = True,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write model.onnx too.")] = False,
    device: Device = "cpu",
) -> Result:
    """Take out filters, rings of filters and channels that are zero, and write the smaller network to a folder.

    The smaller network gives the same outputs. Its MACs and measured latency are printed, and its accuracy
    where the data set is at hand.
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
