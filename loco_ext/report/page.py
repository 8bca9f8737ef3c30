"""Make the page: sections of all runs, their tables, and the HTML around them."""

from collections.abc import Iterator
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from loco_ext.errors import UserError
from loco_ext.input import open_regular
from loco_ext.output import progress_bar, replacing
from loco_ext.report import experiments, training
from loco_ext.report.content import Section, Table, number
from loco_ext.report.runs import MALFORMED, Run, RunError, differing
from loco_ext.version import __version__

MARK = '<meta name="generator" content="loco-ext report'  # near the beginning of every page
_MARKED = 1000  # bytes within which it is


def check_replaceable(path: Path) -> None:
    """Raise UserError if there is a file that :func:`write` has not written, or one that cannot be read."""
    try:
        if not path.exists():
            return
        with open_regular(path) as file:
            written = MARK.encode() in file.read(_MARKED)
    except OSError as error:
        raise UserError(f"out: expected a file that can be replaced, got {str(path)!r}: {error.strerror}") from error
    if not written:
        raise UserError(f"out: expected a new file, or a report to replace, got {str(path)!r}")


def write(path: Path, runs: list[Run], problems: list[str]) -> list[str]:
    """Write the page on the runs; ``problems`` are shown on it.

    Returns:
        The problems, also those of runs whose content turned out to be wrong when it was drawn.

    Raises:
        RunError: nothing is left to be shown.
        OSError: the file cannot be written.
    """
    problems, drawn, sections = list(problems), [], []
    filters = Section("Filters", "Each filter is drawn from its least to its largest weight.")
    with progress_bar(len(runs), "report", unit="run") as bar:
        for run in runs:
            try:
                if run.command in experiments.EXPERIMENTS:
                    sections.append(experiments.section(run))
                else:
                    filters.plots.extend(training.filters(run))
            except RunError as error:
                problems.append(str(error))
            except MALFORMED as error:
                command, kind = run.command, type(error).__name__
                problems.append(f"{run.folder}: expected the files of loco-ext {command} ({kind}: {error})")
            else:
                drawn.append(run)
            bar.update()
    if not drawn:
        raise RunError(problems[-1])
    together = [filters] if filters.plots else []
    if any(run.epochs for run in drawn):
        together.insert(0, training.learning_curves(drawn))
    if frontiers := [run for run in drawn if run.command == "frontier"]:
        together.append(Section("Accuracy by cost", plots=experiments.accuracy_by_cost(frontiers)))
    html = _template().render(
        version=__version__,
        count=len(drawn),
        problems=problems,
        overview=_overview(drawn),
        settings=list(_settings(drawn)),
        sections=together + sections,
    )
    with replacing(path) as temporary:
        # Names of folders may have bytes that are no UTF-8.
        temporary.write_text(html, encoding="utf-8", errors="backslashreplace")
    return problems


def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("loco_ext.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")


def _overview(runs: list[Run]) -> Table:
    """Return one row for each run: the settings that differ among those of its command, and its results."""
    headers = ["run", "command", "results", "settings that differ", "training", "device", "code"]
    names = {run.command: differing([each.settings for each in runs if each.command == run.command]) for run in runs}
    rows = []
    for run in runs:
        settings = "\n".join(f"{name} {training.setting(run.settings.get(name))}" for name in names[run.command])
        metrics = "\n".join(f"{name.replace('_', ' ')} {_metric(name, value)}" for name, value in run.metrics.items())
        code = "\n".join(f"{name} {version}" for name, version in {**run.versions, **_commit(run.commit)}.items())
        rows.append([run.name, run.command, metrics, settings, _duration(run.seconds), run.device or "", code])
    return Table(headers, rows)


def _commit(commit: str | None) -> dict[str, str]:
    """Return a short form of a commit, by name; nothing where it is not recorded.

    >>> _commit("0123456789abcdef-dirty"), _commit(None)
    ({'commit': '0123456789-dirty'}, {})
    """
    if commit is None:
        return {}
    number, mark, _ = commit.partition("-dirty")
    return {"commit": number[:10] + mark}


def _metric(name: str, value: float | None) -> str:
    if value is None:
        return "unknown"
    if "latency" in name:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.2%}" if "accuracy" in name else number(value)


def _duration(seconds: float | None) -> str:
    """Return a time for people.

    >>> _duration(3.21), _duration(605.0), _duration(None)
    ('3.2 s', '10 min 5 s', '')
    """
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:,} min {rest} s" if minutes else f"{seconds:.1f} s"


def _settings(runs: list[Run]) -> Iterator[Table]:
    """Yield all settings of the runs of each command, a column for each run."""
    for command in dict.fromkeys(run.command for run in runs):
        found = [run for run in runs if run.command == command]
        names = dict.fromkeys(name for run in found for name in run.settings)
        rows = [
            [name, *(training.setting(run.settings[name]) if name in run.settings else "" for run in found)]
            for name in names
        ]
        yield Table([command, *(run.name for run in found)], rows)
