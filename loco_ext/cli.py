"""The command line, ``loco-ext``. A user's error is one line on stderr and exit code 2."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from loco_ext import arguments as values
from loco_ext import efcn_command
from loco_ext.commands import UserError, add_device, make_writable, not_writable
from loco_ext.output import json_text, one_line


class _Parser(argparse.ArgumentParser):
    """Reports an error like every other one: without the usage, which is several lines long."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in ``argv``, by default the process's arguments; returns the exit code."""
    try:
        arguments = _parser().parse_args(argv)
        arguments.command(arguments)
    except UserError as error:
        print(f"loco-ext: {one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("loco-ext: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="loco-ext", description="Locality in convolutional networks as something you can turn.")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    _add_demo(commands)
    _add_train(commands)
    _add_frontier(commands)
    efcn_command.add(commands)
    _add_analyze(commands)
    _add_compact(commands)
    info = commands.add_parser(
        "info",
        help="show versions, compiled libraries and the backend of every operation",
        description="Shows versions, which libraries are loaded or why not, and the backend of every operation.",
    )
    info.add_argument("--json", action="store_true", help="print JSON instead of text")
    info.set_defaults(command=_info)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small network with ordinary and with locality-promoting weight decay, make it smaller, lift it",
        description="Trains the same small network twice on handwritten digits, with ordinary and with "
        "locality-promoting weight decay, and shows where in the kernels the weights end up. Then trains the second on "
        "with a penalty that chooses kernels and their sizes, makes the smaller network of it, and trains it on with "
        "weights of their own for all positions. Takes a minute.",
    )
    demo.add_argument(
        "--out", type=Path, default="runs", help="folder for metrics, figure and checkpoints (default: %(default)s)"
    )
    demo.add_argument(
        "--seed",
        type=values.seed,
        default=0,
        help="decides initial weights and order of samples (default: %(default)s)",
    )
    add_device(demo)
    demo.add_argument(
        "--epochs", type=values.count, default=40, help="passes over the training samples (default: %(default)s)"
    )
    demo.add_argument("--json", action="store_true", help="print the metrics as JSON instead of a table")
    demo.set_defaults(command=_demo)


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a network, its weight decay uniform or by locality",
        description="Trains a network on images and writes settings, metrics, a checkpoint and the weights to a "
        "folder. Start it with `torchrun -m loco_ext.cli train ...` to train in several processes.",
        epilog="Options that are not given are the preset's. With another number of epochs its milestones move along.",
    )
    _add_run(train)
    train.add_argument("--preset", default="paper", help="paper or quick (default: %(default)s)")
    train.add_argument("--epochs", type=values.count, help="passes over the training samples")
    train.add_argument("--optimizer", help="sgd, adam or adamw")
    train.add_argument("--lr", type=values.number, dest="learning_rate", help="learning rate of the first epoch")
    train.add_argument("--schedule", help="steps or cosine")
    train.add_argument(
        "--milestones", type=values.epochs, metavar="EPOCHS", help="epochs after which the learning rate falls: 70,140"
    )
    train.add_argument("--factor", type=values.number, help="by which it falls")
    train.add_argument(
        "--locality",
        type=values.locality,
        help="none, GAMMA,ETA, one factor per distance class, or a file that analyze has written",
    )
    train.add_argument("--norm", help="l2 or l1, of the weight decay")
    train.add_argument("--penalty", help="none, rings, kernels or complexity, of all convolutions")
    train.add_argument("--strength", type=values.number, help="of the penalty, the draft's alpha")
    folded = argparse.BooleanOptionalAction
    train.add_argument("--folded", action=folded, default=None, help="penalise weights times batch norm's scale")
    train.add_argument("--solver", help="prox, exact zeros, or subgradient, the penalty as part of the loss")
    train.add_argument("--json", action="store_true", help="print the last epoch's metrics as JSON")
    train.set_defaults(command=_train)


def _add_frontier(commands: Any) -> None:
    frontier = commands.add_parser(
        "frontier",
        help="train a network with many strengths of a penalty: accuracy against multiply-adds",
        description="Trains a network without a penalty, then from there with many strengths of one that takes away "
        "rings of kernels, or kernels; compacts what is left and writes accuracies, multiply-adds and figures to a "
        "folder. Strengths run from the least that leaves nothing down, if none are given.",
        epilog="Options that are not given are those of the preset quick, but for the learning rate of the points.",
    )
    _add_run(frontier)
    frontier.add_argument("--samples", type=values.count, help="train with the first so many samples")
    frontier.add_argument("--method", default="prox", help="prox, subgradient or width (default: %(default)s)")
    frontier.add_argument("--penalty", help="rings or kernels (default: rings, none for the method width)")
    frontier.add_argument("--points", type=values.count, default=15, help="strengths (default: %(default)s)")
    frontier.add_argument(
        "--span", type=values.number, default=1e-4, help="smallest strength over the largest (default: %(default)s)"
    )
    frontier.add_argument("--strengths", type=values.numbers, metavar="NUMBERS", help="the strengths themselves")
    frontier.add_argument("--path", default="dense", help="warm starts: dense, up or down (default: %(default)s)")
    frontier.add_argument("--taus", type=values.numbers, metavar="NUMBERS", help="thresholds of the method subgradient")
    frontier.add_argument("--widths", type=values.numbers, metavar="NUMBERS", help="factors of the method width")
    frontier.add_argument("--batch-norm", help="folded, scaled or live (default: folded)")
    frontier.add_argument("--dense-epochs", type=values.count, help="without a penalty (default: 8)")
    frontier.add_argument("--dense-lr", type=values.number, dest="dense_learning_rate", help="of those (default: 0.1)")
    frontier.add_argument("--epochs", type=values.count, default=2, help="of each point (default: %(default)s)")
    frontier.add_argument(
        "--lr", type=values.number, dest="learning_rate", default=0.02, help="of each point (default: %(default)s)"
    )
    frontier.add_argument("--optimizer", help="of each point: sgd, adam or adamw")
    frontier.add_argument("--refit-epochs", type=values.whole, help="of each compacted network (default: 1)")
    frontier.add_argument("--latency", action="store_true", help="time the networks before and after compaction")
    frontier.add_argument("--json", action="store_true", help="print the JSON instead of a table")
    frontier.set_defaults(command=_frontier)


def _add_run(parser: argparse.ArgumentParser) -> None:
    """What training commands share."""
    parser.add_argument(
        "--model",
        required=True,
        help="small, vgg13, mobilenet, resnet18, resnet20, plain20, resnet8, plain8, vanilla or alexnet",
    )
    parser.add_argument("--dataset", required=True, help="digits, cifar10, cifar100 or fashion-mnist")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with the data set's files; digits need none")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out, if there is one")
    parser.add_argument("--batch-size", type=values.count, help="samples per step, over all processes")
    parser.add_argument("--momentum", type=values.number, help="of SGD")
    parser.add_argument("--weight-decay", type=values.number, help="twice the paper's lambda")
    parser.add_argument("--width", type=values.number, help="factor of the numbers of channels, of resnet* and plain*")
    parser.add_argument("--weighting", help="plain, normalized or scaled, of the penalty")
    parser.add_argument("--kind", help="half or full rings")
    parser.add_argument("--augment", action=argparse.BooleanOptionalAction, default=None, help="random crops and flips")
    parser.add_argument("--seed", type=values.seed, help="decides initial weights, order and augmentations")
    add_device(parser)


def _add_analyze(commands: Any) -> None:
    analyze = commands.add_parser(
        "analyze",
        help="tell how local a network's kernels are, and which decay each layer wants",
        description="Measures how weights change with the distance from the centre of their kernel (LOCO-REG, Table "
        "4), and suggests (gamma, eta) for every layer (Table 6), over all checkpoints given.",
    )
    analyze.add_argument(
        "checkpoints", type=Path, nargs="+", metavar="CHECKPOINT", help="safetensors, or a torch file of weights only"
    )
    analyze.add_argument("--out", type=Path, default="runs/analysis", help="folder for analysis.json and taps.png")
    analyze.add_argument(
        "--weighting", choices=("halves", "layers", "matrices"), default="halves", help="of the statistics"
    )
    analyze.add_argument("--eta-rule", choices=("local", "paper"), default="local", help="of the suggested factors")
    analyze.add_argument("--stat", choices=("signed", "abs", "rms"), default="signed", help="they are estimated from")
    analyze.add_argument(
        "--c", type=values.number, default=1.5, help="strength of the modulation (default: %(default)s)"
    )
    analyze.add_argument("--json", action="store_true", help="print the JSON instead of tables")
    analyze.set_defaults(command=_analyze)


def _add_compact(commands: Any) -> None:
    compact = commands.add_parser(
        "compact",
        help="make the smaller network that a trained one with zeros in its weights amounts to",
        description="Takes out kernels, rings of kernels and channels that are zero, writes the smaller network, which "
        "gives the same outputs, to a folder, and tells its multiply-adds and its measured latency.",
    )
    compact.add_argument(
        "trained", type=Path, metavar="RUN", help="folder of a run, or a checkpoint, whose network has to be named then"
    )
    compact.add_argument("--model", help="of a checkpoint")
    compact.add_argument("--dataset", help="of a checkpoint")
    compact.add_argument("--data", type=Path, metavar="DIR", help="folder with the data set's files, to test on")
    compact.add_argument("--out", type=Path, default="runs/compact", help="folder to write to (default: %(default)s)")
    compact.add_argument(
        "--batch-size", type=values.count, default=64, help="of what it is to be fast on (default: %(default)s)"
    )
    compact.add_argument(
        "--cost",
        choices=("measured", "multiply_adds"),
        default="measured",
        help="what decides how a layer is computed (default: %(default)s)",
    )
    compact.add_argument(
        "--fold-norms",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="put batch normalisations into the convolutions before them",
    )
    compact.add_argument("--onnx", action="store_true", help="write model.onnx too")
    add_device(compact)
    compact.add_argument("--json", action="store_true", help="print the report as JSON")
    compact.set_defaults(command=_compact)


# The commands import what they need themselves: it takes seconds to load, and comes with an extra.


def _demo(arguments: argparse.Namespace) -> None:
    try:
        from loco_ext.experiments import demo, lifting, report, shrinking
    except ModuleNotFoundError as error:
        raise UserError(str(error)) from error

    make_writable(arguments.out)
    settings = demo.Settings(seed=arguments.seed, device=arguments.device, epochs=arguments.epochs)
    try:
        results = demo.run(settings, arguments.out)
    except OSError as error:
        raise not_writable(arguments.out, error) from error
    if arguments.json:
        print(demo.to_json(settings, results))
    else:
        report.print_tables(results.networks)
        shrinking.print_table(results.shrunk)
        lifting.print_table(results.lifted)
        print(f"Metrics, figure and checkpoints are in {arguments.out}")


def _train(arguments: argparse.Namespace) -> None:
    try:
        from loco_ext.experiments import data, processes, run, settings
    except ModuleNotFoundError as error:
        raise UserError(str(error)) from error

    given = {name: value for name, value in vars(arguments).items() if name in settings.Settings.__dataclass_fields__}
    given["data"] = arguments.dataset
    if arguments.penalty == "none":
        given["penalty"] = None
    try:
        setting = settings.from_preset(arguments.preset, **given)
        dataset = data.load(setting.data, arguments.data)
        with processes.joined(arguments.device) as joined:
            history = run.run(setting, dataset, arguments.out, joined, resume=arguments.resume)
    except (settings.SettingsError, data.DataError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise not_writable(arguments.out, error) from error
    if not joined.first:
        return
    if arguments.json:
        print(json_text(vars(history[-1])))
    else:
        print(f"Test accuracy {history[-1].test_accuracy:.2%}. Metrics, checkpoint and weights are in {arguments.out}")


def _frontier(arguments: argparse.Namespace) -> None:
    try:
        from loco_ext.experiments import data, frontier, settings
        from loco_ext.experiments.report import print_table
    except ModuleNotFoundError as error:
        raise UserError(str(error)) from error

    options = {name: value for name, value in vars(arguments).items() if value is not None}
    options["data"] = arguments.dataset
    if arguments.method != "width":
        options.setdefault("penalty", "rings")
    training, own = (
        {name: value for name, value in options.items() if name in kind.__dataclass_fields__}
        for kind in (settings.Settings, frontier.FrontierSettings)
    )
    try:
        setting = frontier.FrontierSettings(settings.from_preset("quick", **training), **own)
        dataset = data.load(arguments.dataset, arguments.data)
        if arguments.samples is not None:
            dataset = dataset.first(arguments.samples)
        record = frontier.measure(setting, dataset, arguments.out, arguments.device, resume=arguments.resume)
    except (settings.SettingsError, data.DataError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise not_writable(arguments.out, error) from error
    if arguments.json:
        print(json_text(record, indent=2))
    else:
        print_table(*frontier.rows(record))
        print(f"frontier.json and figures are in {arguments.out}")


def _analyze(arguments: argparse.Namespace) -> None:
    try:
        from loco_ext.analysis import command
    except ModuleNotFoundError as error:
        raise UserError(str(error)) from error

    try:
        analysis = command.analyze(
            arguments.checkpoints,
            weighting=arguments.weighting,
            eta_rule=arguments.eta_rule,
            stat=arguments.stat,
            c=arguments.c,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    make_writable(arguments.out)
    try:
        command.save(analysis, arguments.out)
    except OSError as error:
        raise not_writable(arguments.out, error) from error
    if arguments.json:
        print(json_text(analysis.to_dict(), indent=2))
    else:
        command.show(analysis)
        print(f"analysis.json, for `loco-ext train --locality`, and taps.png are in {one_line(str(arguments.out))}")


def _compact(arguments: argparse.Namespace) -> None:
    try:
        from loco_ext.experiments import compacting, data
        from loco_ext.experiments.settings import SettingsError
    except ModuleNotFoundError as error:
        raise UserError(str(error)) from error

    try:
        trained = compacting.read_trained(arguments.trained, arguments.model, arguments.dataset)
        known = trained.data == "digits" or arguments.data is not None
        dataset = data.load(trained.data, arguments.data) if known else None
        make_writable(arguments.out)
        compacted = compacting.compact(
            trained,
            batch_size=arguments.batch_size,
            cost=arguments.cost,
            fold_norms=arguments.fold_norms,
            dataset=dataset,
            device=arguments.device,
        )
        compacting.save(compacted, trained, arguments.out, onnx=arguments.onnx)
    except (SettingsError, data.DataError, compacting.CheckpointError, ModuleNotFoundError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise not_writable(arguments.out, error) from error
    if arguments.json:
        print(json_text(compacted.to_dict()))
        return
    print(compacted.report)
    if compacted.accuracy_before is not None:
        print(f"test accuracy {compacted.accuracy_before:.2%} -> {compacted.accuracy_after:.2%}")
    print(f"The smaller network and its report are in {arguments.out}")


def _info(arguments: argparse.Namespace) -> None:
    from loco_ext import info

    info.main(as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
