"""Find runs in folders, and read those of every command as one kind of record.

The files of a folder tell which command has written them:

    settings.json, metrics.jsonl    train, also while it is running; model.safetensors has its weights
    shrink.json, report.json        shrink; the folder training has the run that trains the small network on
    report.json                     compact
    analysis.json                   analyze
    demo.json                       demo
    frontier.json, efcn.json, landscapes.json, regions.json     the experiment of that name

Runs in a folder of an experiment or of ``shrink`` are parts of it. One that has not been finished is left out.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from loco_ext.errors import UserError
from loco_ext.experiments.frontier_figures import dense_path
from loco_ext.experiments.records import Record
from loco_ext.experiments.regions import best
from loco_ext.input import open_regular
from loco_ext.output import json_text

MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)  # errors that wrong content of a file raises
EPOCH = ("epoch", "learning_rate", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "seconds")
LARGEST = 1e300  # matplotlib cannot draw numbers near the largest float


class RunError(UserError, ValueError):
    """Raised where there are no runs, or none that can be read; the message names the folder or file."""


@dataclass(frozen=True)
class Run:
    """A run of one command."""

    folder: Path
    settings: Record  # those of its training and its own, by name, as JSON has them, and the digest of its data
    metrics: dict[str, float | None]  # results in a few numbers; None where one is not finite or was not measured
    content: Record  # what its main file holds
    versions: dict[str, str] = field(default_factory=dict)  # of what its numbers depend on; empty if not recorded
    device: str | None = None  # type of the torch device, and the number of processes where there were several
    seconds: float | None = None  # time of its training, without measurements; None where it is not recorded
    epochs: list[Record] = field(default_factory=list)  # metrics of each epoch of the commands that train one network
    name: str = ""  # the part of the folder's path that differs from those of the other runs
    command: str = ""  # the command of loco-ext that made it

    def __post_init__(self) -> None:
        if not isinstance(self.settings, dict) or not isinstance(self.versions, dict):
            raise TypeError("expected settings and versions by name")
        if not isinstance(self.content.get("commit"), str | None):
            raise TypeError(f"expected a commit as text, found {self.content['commit']!r}")
        for value in self.metrics.values():
            _number(value)

    @property
    def commit(self) -> str | None:
        """Commit of the code, as :func:`loco_ext.version.commit` returns it; None where it is not recorded."""
        return self.content.get("commit")

    def to_dict(self) -> Record:
        """Return everything but epochs and content, as plain data: the line of ``loco-ext report --json``."""
        names = ("command", "settings", "commit", "versions", "device", "seconds", "metrics")
        return {"folder": str(self.folder), **{name: getattr(self, name) for name in names}}


class _Kind(NamedTuple):
    """Names the files by which the runs of a command are recognised, and the function that reads them."""

    files: tuple[str, ...]
    read: Callable[[Path], Run]
    whole: bool  # runs in folders below are parts of this one


def find(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Return the runs in the folders and below, by command in the order of the paths, and why others were left out.

    Raises:
        RunError: a folder is missing or cannot be listed, has no runs, or none of its runs can be read.
    """
    places: dict[Path, tuple[Path, str]] = {}
    for folder in folders:
        found = list(_commands_below(folder))
        if not found:
            raise RunError(f"{folder}: expected a folder with runs in it, or below, found none")
        places |= {path.resolve(): (path, command) for path, command in found if path.resolve() not in places}
    runs, problems = [], []
    names, order = _names_below_common(list(places)), list(_KINDS)
    for place, (path, command) in sorted(places.items(), key=lambda entry: order.index(entry[1][1])):
        try:
            run = _KINDS[command].read(path)
        except RunError as error:
            problems.append(str(error))
        except MALFORMED as error:
            problems.append(f"{path}: expected the files of loco-ext {command} ({type(error).__name__}: {error})")
        else:
            runs.append(replace(run, name=names[place], command=command))
    if not runs:
        raise RunError(problems[0])
    return runs, problems


def _commands_below(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folders of runs with their commands."""

    def refuse(error: OSError) -> None:
        raise RunError(f"{error.filename}: expected a folder with runs: {error.strerror}")

    for path, below, files in os.walk(folder, onerror=refuse):
        below.sort()
        for command, kind in _KINDS.items():
            if set(kind.files) <= set(files):
                yield Path(path), command
                if kind.whole:
                    below.clear()
                break


def _names_below_common(places: list[Path]) -> dict[Path, str]:
    """Return the path of each folder below the deepest one that contains all of them."""
    if len(places) == 1:
        return {places[0]: places[0].name}
    common = Path(os.path.commonpath(places))
    return {place: common.name if place == common else str(place.relative_to(common)) for place in places}


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        RunError: the file cannot be read, or is not JSON.
    """
    return _parsed(path, json.loads, "JSON")


def _parsed(path: Path, parse: Callable[[bytes], Any], what: str) -> Any:
    try:
        with open_regular(path) as file:
            return parse(file.read())
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: expected {what} ({type(error).__name__})") from error


def _read_epochs(path: Path) -> list[Record]:
    """Return the lines of a file of metrics, whose numbers are finite or None."""
    epochs = _parsed(path, lambda text: [json.loads(line) for line in text.splitlines()], "lines of JSON")
    if not epochs:
        raise RunError(f"{path}: expected at least one epoch, found none")
    for epoch in epochs:
        for name in EPOCH:
            _number(epoch[name])
    return epochs


def _number(value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise TypeError(f"expected a number, found {value!r}")
    if value is not None and not abs(value) <= LARGEST:
        raise ValueError(f"expected a finite number, at most {LARGEST:g}, found {value!r}")
    return value


def _seconds(epochs: list[Record]) -> float:
    return sum(epoch["seconds"] for epoch in epochs)


def _train(folder: Path) -> Run:
    record, epochs = read_json(folder / "settings.json"), _read_epochs(folder / "metrics.jsonl")
    processes = record["processes"]
    device = processes["device"] + (f" x {processes['count']}" if processes["count"] > 1 else "")
    names = ("test_accuracy", "test_loss", "train_accuracy", "train_loss")
    metrics = {"epochs": len(epochs)} | {name: epochs[-1][name] for name in names}
    settings = {**record["settings"], "data_digest": record["dataset"].get("digest")}
    return Run(folder, settings, metrics, record, record["versions"], device, _seconds(epochs), epochs)


def _shrink(folder: Path) -> Run:
    shrinking, compacted = read_json(folder / "shrink.json")["shrinking"], _compact(folder)
    training = _train(folder / "training")
    before = read_json(folder / "start" / "manifest.json")["content"]["report"]
    metrics = compacted.metrics | {name: before[name] for name in ("macs_before", "parameters_before")}
    metrics.pop("latency_before", None)  # it is the latency of the small network before compaction
    settings = training.settings | shrinking | {"learning_rate": training.settings["learning_rate"]}
    return replace(training, folder=folder, settings=settings, metrics=metrics, content=compacted.content)


def _compact(folder: Path) -> Run:
    record = read_json(folder / "report.json")
    costs = [f"{name}_{when}" for name in ("macs", "parameters", "latency") for when in ("before", "after")]
    metrics = {"test_accuracy": record["accuracy_after"]} | {name: record[name] for name in costs}
    metrics = {name: value for name, value in metrics.items() if value is not None}  # what was measured
    settings = {name: record[name] for name in ("model", "data")}
    return Run(folder, settings, metrics, record, record.get("versions", {}), record.get("device"))


def _analyze(folder: Path) -> Run:
    record = read_json(folder / "analysis.json")
    settings = record["options"] | {"checkpoints": list(record["statistics"])}
    return Run(folder, settings, {"layers": len(record["locality"])}, record, record.get("versions", {}))


def _demo(folder: Path) -> Run:
    record = read_json(folder / "demo.json")
    metrics = {f"test_accuracy, {network['name']}": network["accuracy"] for network in record["networks"]}
    return Run(folder, record["settings"], metrics, record, record["versions"], record["settings"]["device"])


def _experiment(name: str, metrics: Callable[[Record], dict[str, Any]]) -> _Kind:
    """Return the reader of an experiment whose results are in ``NAME.json``."""

    def read(folder: Path) -> Run:
        record = read_json(folder / f"{name}.json")
        settings = {key: value for key, value in record["settings"].items() if key != "training"}
        settings = record["settings"].get("training", {}) | settings | {"data_digest": record.get("digest")}
        parts = [_seconds(_read_epochs(path)) for path in sorted(folder.rglob("metrics.jsonl"))]
        seconds = sum(parts) if parts else None
        return Run(folder, settings, metrics(record), record, record["versions"], record["device"], seconds)

    return _Kind((f"{name}.json",), read, whole=True)


def _frontier(record: Record) -> dict[str, Any]:
    points = [point for path in record["paths"] for point in path["points"]]
    dense = dense_path(record)
    accuracies = [_number((point["refitted"] or point["metrics"])["accuracy"]) for point in points]
    return {
        "networks": len(points),
        "dense_accuracy": dense["metrics"]["accuracy"],
        "best_accuracy": max(accuracy for accuracy in accuracies if accuracy is not None),
        "dense_macs": dense["macs"],
        "least_macs": min(point["macs"] for point in points),
    }


def _efcn(record: Record) -> dict[str, Any]:
    def last(network: Record) -> float | None:
        return _number(network["epochs"][-1]["test_accuracy"])

    lifted = [last(branch) for branch in record["branches"] if branch["relax"] != "cnn"]
    known = [accuracy for accuracy in lifted if accuracy is not None]
    metrics = {"cnn_accuracy": last(record["cnn"]), "best_lifted_accuracy": max(known, default=None)}
    return metrics | ({"fcn_accuracy": last(record["fcn"])} if record["fcn"] else {})


def _landscapes(record: Record) -> dict[str, Any]:
    return {f"test_accuracy, {arm}": _number(figures["accuracy"]["mean"]) for arm, figures in record["arms"].items()}


def _regions(record: Record) -> dict[str, Any]:
    vanilla = next(arm for arm in record["arms"] if arm["strength"] == 0)
    chosen = best(record["arms"])
    return {
        "vanilla_accuracy": _number(vanilla["accuracy"]["mean"]),
        "vanilla_radius": _number(vanilla["median_radius"]["2"]["mean"]),
        "best_ratio": None if chosen is None else chosen["ratio"]["2"]["mean"],
    }


def _unfinished(folder: Path) -> Run:
    raise RunError(f"{folder}: expected a run that is finished, or a training after its first epoch; resume it")


_KINDS = {
    "train": _Kind(("settings.json", "metrics.jsonl"), _train, whole=False),
    "shrink": _Kind(("shrink.json", "report.json"), _shrink, whole=True),
    "compact": _Kind(("report.json",), _compact, whole=False),
    "analyze": _Kind(("analysis.json",), _analyze, whole=False),
    "demo": _Kind(("demo.json",), _demo, whole=False),
    "frontier": _experiment("frontier", _frontier),
    "efcn": _experiment("efcn", _efcn),
    "landscapes": _experiment("landscapes", _landscapes),
    "regions": _experiment("regions", _regions),
    # Folders that none of the commands above has finished; these come last, as their files are parts of the others'.
    "experiment": _Kind(("settings.json",), _unfinished, whole=True),
    "shrinking": _Kind(("shrink.json",), _unfinished, whole=True),
}


def differing(settings: Sequence[Record]) -> list[str]:
    """Return the names of the settings that are not the same in all.

    >>> differing([{"seed": 0, "width": 1.0}, {"seed": 1, "width": 1.0}])
    ['seed']
    """
    names = dict.fromkeys(name for each in settings for name in each)
    return [name for name in names if len({json_text(each.get(name)) for each in settings}) > 1]
