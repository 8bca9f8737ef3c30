"""The command ``loco-ext efcn``."""

import argparse
from pathlib import Path
from typing import Any

from loco_ext import arguments as values
from loco_ext.commands import UserError, add_device, not_writable
from loco_ext.output import json_text


def add(commands: Any) -> None:
    """Adds the command to the parser's."""
    efcn = commands.add_parser(
        "efcn",
        help="train a network, relax its convolutions at several times, and train on: the eFCN experiment",
        description="Trains a convolutional network; lifts it, as it was at several times of its training, to networks "
        "whose weights are not shared and whose receptive fields are larger; trains those on. Writes accuracies, "
        "deviations from the convolutions, gradients, curvatures, interpolations and figures to a folder.",
        epilog="Options that are not given are the preset's: paper (d'Ascoli et al. 2019, CIFAR-10), alexnet (their "
        "appendix B, CIFAR-100) or quick, an hour on a CPU.",
    )
    efcn.add_argument("--preset", default="paper", help="paper, alexnet or quick (default: %(default)s)")
    efcn.add_argument("--model", help="as for train")
    efcn.add_argument("--dataset", help="digits, cifar10, cifar100 or fashion-mnist")
    efcn.add_argument("--data", type=Path, metavar="DIR", help="folder with the data set's files; digits need none")
    efcn.add_argument("--samples", type=values.count, help="train with the first so many samples")
    efcn.add_argument("--out", type=Path, required=True, help="folder of the experiment")
    efcn.add_argument("--resume", action="store_true", help="go on with the experiment in --out, if there is one")
    efcn.add_argument("--epochs", type=values.count, help="of the network")
    efcn.add_argument("--lr", type=values.number, dest="learning_rate", help="of the network")
    efcn.add_argument("--batch-size", type=values.count, help="samples per step")
    efcn.add_argument("--width", type=values.number, help="factor of the numbers of channels, of resnet* and plain*")
    efcn.add_argument(
        "--switch", type=values.wholes, dest="switch_times", metavar="EPOCHS", help="epochs to lift after: 0,3,10,30"
    )
    efcn.add_argument(
        "--relax",
        type=lambda text: tuple(text.split(",")),
        dest="relaxations",
        help="lcn, a radius to grow by, full, or several of them: lcn,2,full",
    )
    efcn.add_argument("--branch-epochs", type=values.count, help="of each lifted network")
    efcn.add_argument("--branch-lr", type=values.number, dest="branch_learning_rate", help="of lifted networks")
    efcn.add_argument(
        "--fcn-epochs", type=values.whole, help="of the fully connected network from scratch; 0: there is none"
    )
    efcn.add_argument("--landscape-samples", type=values.count, help="that gradient and curvature are measured on")
    efcn.add_argument("--power-iterations", type=values.whole, help="for the curvature, at most; 0: not measured")
    efcn.add_argument("--interpolation-points", type=values.whole, help="on each path; 0: not measured")
    efcn.add_argument("--string-steps", type=values.whole, help="of the interpolation along a string")
    efcn.add_argument(
        "--stiffness", type=values.number, help="of that string, below 0.5: how far points are drawn together"
    )
    efcn.add_argument("--seed", type=values.seed, help="decides initial weights")
    add_device(efcn)
    efcn.add_argument("--json", action="store_true", help="print the JSON instead of a table")
    efcn.set_defaults(command=_efcn)


def _efcn(arguments: argparse.Namespace) -> None:
    try:
        from loco_ext.experiments import data, efcn
        from loco_ext.experiments.efcn_settings import EfcnSettings, efcn_preset
        from loco_ext.experiments.report import print_table
        from loco_ext.experiments.settings import Settings, SettingsError
    except ModuleNotFoundError as error:
        raise UserError(str(error)) from error

    known = Settings.__dataclass_fields__ | EfcnSettings.__dataclass_fields__
    options = {name: value for name, value in vars(arguments).items() if name in known}
    options["data"] = arguments.dataset
    try:
        setting = efcn_preset(arguments.preset, **options)
        dataset = data.load(setting.training.data, arguments.data)
        if arguments.samples is not None:
            dataset = dataset.first(arguments.samples)
        record = efcn.measure(setting, dataset, arguments.out, arguments.device, resume=arguments.resume)
    except (SettingsError, data.DataError, MemoryError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise not_writable(arguments.out, error) from error
    if arguments.json:
        print(json_text(record))
    else:
        print_table(*efcn.rows(record))
        print(f"efcn.json and figures are in {arguments.out}")
