"""The files of an experiment with several networks: its settings, and measurements that a resumed run reads again."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loco_ext.experiments.data import Dataset
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.settings import SettingsError
from loco_ext.folders import check_results
from loco_ext.input import check_form
from loco_ext.output import json_text, write_json
from loco_ext.version import __version__, commit

Record = dict[str, Any]


def begin(out: Path, settings: Any, data: Dataset, processes: Processes, *, resume: bool, **facts: Any) -> Record:
    """Write the settings of an experiment and the digest of its data to ``settings.json`` in ``out``; return them.

    An experiment may be resumed with the code of another commit, which is then recorded in the place of the first.

    Raises:
        SettingsError: ``out`` holds another experiment or, without ``resume``, any; files in it cannot be read.
        UserError: ``out`` has results of something else.
    """
    path = out / "settings.json"
    record = {
        "settings": asdict(settings),
        "training_samples": len(data.train.labels),
        "test_samples": len(data.test.labels),
        "digest": data.description["digest"],
        **facts,
        "device": processes.device.type,
        **provenance(),
    }
    if path.exists():
        if not resume:
            raise SettingsError(f"{out}: holds an experiment already; resume it, or choose another folder")
        if _without_commit(read(path)) != _without_commit(json.loads(json_text(record))):
            raise SettingsError(f"{path}: of another experiment; resume it with its own settings and data")
    else:
        check_results(out)
    write_json(path, record)
    return record


def _without_commit(record: Any) -> Any:
    return {**record, "commit": None} if isinstance(record, dict) else record


def provenance() -> Record:
    """Return the code that the numbers depend on: its commit, and the versions of packages."""
    return {"commit": commit(), "versions": {"loco_ext": __version__, "torch": torch.__version__}}


def grouped(records: Iterable[Record], name: str) -> dict[Any, list[Record]]:
    """Return the records by their entry of this name, in the order in which its values come first.

    >>> grouped([{"arm": "plain", "seed": 0}, {"arm": "plain", "seed": 1}], "arm").keys()
    dict_keys(['plain'])
    """
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(record[name], []).append(record)
    return groups


def rounded(values: Tensor, digits: int) -> list[list[float]]:
    """Return a matrix as plain numbers with this many significant digits."""
    return [[float(f"{value:.{digits}g}") for value in row] for row in values.tolist()]


def cached_json(path: Path, make: Callable[[], Any], form: Any = object) -> Any:
    """Return the content of a JSON file; if there is none, write what ``make`` returns first.

    Raises:
        SettingsError: as for :func:`read`.
    """
    if not path.exists():
        write_json(path, make(), indent=None)
    return read(path, form)


def read(path: Path, form: Any = object) -> Any:
    """Return the content of a JSON file that the experiment has written.

    Raises:
        SettingsError: the file is not JSON, or not of the form, which :func:`loco_ext.input.check_form` describes.
    """
    try:
        record = json.loads(path.read_text())
    except (ValueError, FileNotFoundError) as error:
        raise SettingsError(f"{path}: expected JSON, remove it to measure anew ({type(error).__name__})") from error
    try:
        check_form(record, form)
    except ValueError as error:
        raise SettingsError(f"{path}, {error}; remove it to measure anew") from error
    return record


def mean_and_error(values: Sequence[float | None]) -> Record:
    """Return the mean and its standard error; None where a value is missing, or there are too few.

    >>> mean_and_error([1.0, 3.0])
    {'mean': 2.0, 'standard_error': 1.0}
    >>> [list(mean_and_error(values).values()) for values in ([1.0], [1.0, math.nan], [1.0, None])]
    [[1.0, None], [None, None], [None, None]]
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < len(values):
        return {"mean": None, "standard_error": None}
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return {"mean": statistics.fmean(known), "standard_error": error}


def with_error(found: Record, form: str, factor: float = 1, *, name: str = "mean", missing: str = "") -> str:
    """Format a mean, or the figure called ``name`` beside it, with its standard error unless there is a single seed.

    >>> with_error({"mean": 0.5, "standard_error": 0.25, "difference": 0.125}, ".1f", 100)
    '50.0 ± 25.0'
    """
    value, error = found.get(name), found.get("standard_error" if name == "mean" else f"{name}_standard_error")
    if value is None:
        return missing
    shown = format(factor * value, form)
    return shown if error is None else f"{shown} ± {format(factor * error, form.removeprefix('+'))}"
