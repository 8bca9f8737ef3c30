"""The command ``loco-ext compact``."""

import argparse
from pathlib import Path

from loco_ext import arguments as values
from loco_ext.commands import add_data, add_device, add_out, make_writable, tell, writing_to
from loco_ext.output import json_text, status

DESCRIPTION = (
    "Takes out kernels, rings of kernels and channels that are zero, writes the smaller network, which gives the same "
    "outputs, to a folder, and tells its multiply-adds and its measured latency."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``loco-ext compact``."""
    told = "folder of a run, or a checkpoint, whose network has to be named then"
    parser.add_argument("trained", type=Path, metavar="RUN", help=told)
    parser.add_argument("--model", help="of a checkpoint; of a run, where it is a function of yours")
    parser.add_argument("--dataset", dest="data", metavar="NAME", help="of a checkpoint")
    add_data(parser, "to test on")
    add_out(parser, "to write to", "runs/compact")
    told = "of what it is to be fast on (default: %(default)s)"
    parser.add_argument("--batch-size", type=values.count, default=64, help=told)
    told = "what decides how a layer is computed (default: %(default)s)"
    parser.add_argument("--cost", choices=("measured", "multiply_adds"), default="measured", help=told)
    told = "put batch normalisations into the convolutions before them (default: yes)"
    parser.add_argument("--fold-norms", action=argparse.BooleanOptionalAction, default=None, help=told)
    parser.add_argument("--onnx", action="store_true", help="write model.onnx too")
    add_device(parser)


def run(arguments: argparse.Namespace) -> None:
    """Compact the network of a run or checkpoint, write it to ``--out`` and print the report."""
    from loco_ext.experiments import compacting

    trained = compacting.read_trained(arguments.trained, arguments.model, arguments.data)
    dataset = trained.load_data(arguments.folder)
    make_writable(arguments.out)
    with status("loco_ext.sparsity.compaction"):
        compacted = compacting.compact(
            trained,
            batch_size=arguments.batch_size,
            cost=arguments.cost,
            fold_norms=arguments.fold_norms is not False,
            dataset=dataset,
            device=arguments.device,
        )
    with writing_to(arguments.out):
        compacting.save(compacted, trained, arguments.out, onnx=arguments.onnx)

    def show() -> None:
        print(compacted.report)
        if compacted.accuracy_before is not None:
            print(f"test accuracy {compacted.accuracy_before:.2%} -> {compacted.accuracy_after:.2%}")
        print(f"The smaller network and its report are in {arguments.out}")

    tell(arguments, lambda: json_text(compacted.to_dict()), show)
