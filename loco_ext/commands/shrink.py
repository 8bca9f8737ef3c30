"""The command ``loco-ext shrink``."""

from pathlib import Path
from typing import Any

from loco_ext.commands import (
    Data,
    Device,
    Out,
    Result,
    Resume,
    SettingsOptions,
    TrainedData,
    TrainedModel,
    TrainedPath,
    command,
    make_writable,
    writing_to,
)
from loco_ext.experiments import compacting, shrinking
from loco_ext.experiments.data import load
from loco_ext.output import json_text, status


@command(SettingsOptions(shrinking.Shrinking, {"": {}}))
def run(
    trained: TrainedPath,
    *,
    model: TrainedModel = None,
    data: TrainedData = None,
    folder: Data = None,
    out: Out = Path("runs/shrink"),
    resume: Resume = False,
    device: Device = "cpu",
    **options: Any,
) -> Result:
    """Make a trained network as small as you say, train it further, and write the small network to a folder.

    The command removes filters and rings of their taps, beginning with those that matter least to the loss for what
    they cost. Give exactly one of --macs, --parameters and --latency: 0.5 leaves half of what the network has.
    Batch normalisations are folded at the end, as the command compact does. The training keeps the run's batch size,
    optimizer, momentum, weight decay and its norm, --augment, --crop, --amp and seed; it has no --locality, --penalty
    or --pilcro.
    """
    how = shrinking.Shrinking(**options)
    found = compacting.read_trained(trained, model, data)
    dataset = found.load_data(folder) or load(found.data, folder)  # the latter says which folder is missing
    shrinking.check_folder(out)
    make_writable(out)
    with writing_to(out):
        with status("loco_ext.sparsity.compaction"):
            shrunk = shrinking.shrink(found, how, dataset, out, device, resume=resume)
        compacting.save(shrunk.after, found, out, onnx=False)

    def show() -> None:
        shrunk.show(how.batch_size)
        print(f"The small network and its report are in {out}")

    return Result(lambda: json_text(shrunk.to_dict()), show)
