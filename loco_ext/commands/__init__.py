"""The commands of ``loco-ext``, one module each, and what they share.

Each module has a function ``run``, decorated by :func:`command`, whose parameters are the command's options. It is
imported only when its command is used, because its dependencies take seconds to load and come with an extra.
"""

import importlib
import inspect
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from copy import copy
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple, Optional, get_args, get_origin, get_type_hints

import typer
from typer.exceptions import TyperException

from loco_ext import option_parsers
from loco_ext.errors import UserError, name_options
from loco_ext.output import json_text, one_line, print_table, quiet, setting_text
from loco_ext.version import __version__

COMMANDS = {
    "demo": "Show the whole package on handwritten digits, in a minute.",
    "train": "Train a network, with weight decay uniform or by locality.",
    "frontier": "Train with many penalty strengths: accuracy against cost.",
    "efcn": "Turn convolutions into larger layers, and train these further.",
    "landscapes": "Flatten networks' importance landscapes, and measure them.",
    "regions": "Widen a network's linear regions, and measure them.",
    "reproduce": "Compute the papers' tables, beside the published values.",
    "analyze": "Measure how local a network is, and suggest its decay.",
    "compact": "Remove a network's zeros; its outputs stay the same.",
    "shrink": "Make a trained network as small as you say; train it further.",
    "report": "Make one HTML page out of any runs.",
    "info": "Show versions, libraries and the backend of every operation.",
}

# Options of several commands.
Out = Annotated[Path, typer.Option(callback=option_parsers.folder, help="Folder to write the results to.")]
Data = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="Folder of the data set; digits need no folder.")
]
Device = Annotated[
    str, typer.Option(parser=option_parsers.device, metavar="NAME", help="Torch device, such as cpu or cuda:1.")
]
TrainedPath = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or a checkpoint of weights.")]
TrainedModel = Annotated[
    str | None,
    typer.Option("--model", help="Name of the checkpoint's network. A run knows its own, unless it is your function."),
]
TrainedData = Annotated[
    str | None,
    typer.Option("--dataset", metavar="NAME", help="Data set that a checkpoint was trained on. A run knows its own."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out if there is one.")]
Samples = Annotated[
    int | None,
    typer.Option(
        min=1, max=option_parsers.MOST, help="Number of training samples to use, from the first on.  [default: all]"
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_Quiet = Annotated[bool, typer.Option("--quiet", help="Print only errors, and the JSON that --json asks for.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"loco-ext {__version__}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
]


class Result(NamedTuple):
    """A command's result: ``json()`` returns it as JSON, ``show()`` prints it for people to read."""

    json: Callable[[], str]
    show: Callable[[], None]


class SettingsOptions(NamedTuple):
    """One option for each field of the dataclass ``kind`` that is annotated with a ``typer.Option``.

    Args:
        presets: values of the fields by the name of the preset; the help shows them as defaults unless the option has
            its own text for them. A field without any is required.
        only: the fields that get an option; None for all that are annotated with one.
    """

    kind: type
    presets: Mapping[str, Mapping[str, Any]]
    only: Collection[str] | None = None

    def parameters(self) -> Iterator[inspect.Parameter]:
        """Yield the options as parameters of a command; the value of one that is not given is None."""
        hints = get_type_hints(self.kind, include_extras=True)
        for field in fields(self.kind):
            kind, *options = get_args(hints[field.name]) if get_origin(hints[field.name]) is Annotated else [None]
            if not options or (self.only is not None and field.name not in self.only):
                continue
            option: Any = copy(options[0])
            values = {name: preset.get(field.name, field.default) for name, preset in self.presets.items()}
            values = {name: value for name, value in values.items() if value is not MISSING}
            default_text = option.show_default if isinstance(option.show_default, str) else _defaults(values)
            if default_text:  # typer would put it into parentheses
                option.help = f"{option.help}  [default: {default_text}]"
            option.show_default = False
            kind = str if option.parser else kind  # typer would ask for several values of a tuple
            default = None if values else inspect.Parameter.empty
            annotation: Any = Annotated[Optional[kind] if values else kind, option]  # noqa: UP045
            yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def command(*settings: SettingsOptions, epilog: str | None = None) -> Callable[[Callable[..., Result | None]], Any]:
    """Return a decorator that makes a function a command, with the options of ``settings``, --json and --quiet.

    The options of ``settings`` that were given reach the function as keyword arguments. It returns what is printed, or
    None for nothing.
    """

    def decorate(function: Callable[..., Result | None]) -> Any:
        optional = [parameter for each in settings for parameter in each.parameters()]
        names = {parameter.name for parameter in optional}

        def run(as_json: bool, silent: bool, **values: Any) -> None:
            given = {name: value for name, value in values.items() if value is not None or name not in names}
            # A network of the user's may print while it is built or trained; stdout is for the JSON alone.
            with quiet(silent), redirect_stdout(sys.stderr) if as_json else nullcontext():
                result = function(**given)
            if result is not None and as_json:
                print(result.json())
            elif result is not None and not silent:
                result.show()

        own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        flags = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
            for name, kind in (("as_json", _Json), ("silent", _Quiet))
        ]
        run.__signature__ = inspect.Signature([*own, *optional, *flags])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *optional, *flags)}
        run.__doc__, run.epilog = function.__doc__, epilog  # type: ignore[attr-defined]
        return run

    return decorate


def experiment(module: ModuleType, settings: Any, data: Any, out: Path, device: str, *, resume: bool) -> Result:
    """Run an experiment, whose module has the functions ``measure`` and ``rows``, and return its record and table."""
    with writing_to(out):
        record = module.measure(settings, data, out, device, resume=resume)

    def show() -> None:
        print_table(*module.rows(record))
        print(f"{module.__name__.rpartition('.')[2]}.json and figures are in {out}")

    return Result(lambda: json_text(record), show)


def run(argv: Sequence[str] | None) -> int:
    """Run the command in ``argv``; None means the process's arguments. Errors made by the user are printed to stderr.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    given = given[1:] if given[:1] == ["--"] else given
    name = next(iter(given), "")
    options: dict[str, str] = {}
    try:
        group = typer.main.get_command(_application(name))
        if name in COMMANDS:
            parameters = group.commands[name].params  # type: ignore[attr-defined]
            options = {parameter.name: parameter.opts[0] for parameter in parameters}
        with group.make_context("loco-ext", given) as context:
            group.invoke(context)
    except typer.Exit as stop:  # after --help and --version
        return stop.exit_code
    except TyperException as error:
        place = f"loco-ext {name}" if name in COMMANDS else "loco-ext"
        return _fail(f"{_message(error).rstrip('.')} (see {place} --help)", error.exit_code)
    except UserError as error:
        return _fail(name_options(str(error), options), error.exit_code)
    return 0


def _message(error: TyperException) -> str:
    """Return the message of an error in the command line; for a wrong value, what was expected and what was given."""
    if type(error) is not typer.BadParameter or error.param is None:
        return " ".join(error.format_message().split())  # the choices of a missing argument are one on each line
    text = error.message
    for found in getattr(error.__cause__, "errors", list)():  # typer checks values by pydantic
        kind, given = found["type"], found["input"]
        if kind in _EXPECTED:
            text = f"expected {_EXPECTED[kind].format(**found.get('ctx', {}))}, got {given!r}"
        elif " is not one of " in text:
            choices = text.partition(" is not one of ")[2].replace("'", "").rstrip(".")
            text = f"expected one of {choices}, got {given!r}"
    return f"{error.param.opts[0]}: {text}"


_EXPECTED = {
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le}",
    "int_parsing": "an integer",
    "float_parsing": "a number",
}


def _fail(text: str, code: int) -> int:
    print(f"loco-ext: {one_line(text)}", file=sys.stderr)
    return code


def _application(used: str) -> typer.Typer:
    """Return the command line; of the commands, only ``used`` is imported, and the others are there to be listed."""
    app = typer.Typer(
        help="Locality in convolutional networks as something you can turn up or down.",
        rich_markup_mode=None,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def _(version: _Version = False) -> None:
        pass

    for name, summary in COMMANDS.items():
        if name == used:
            function = importlib.import_module(f"loco_ext.commands.{name}").run
            app.command(name, help=inspect.getdoc(function), epilog=function.epilog)(function)
        else:
            app.command(name, help=summary)(lambda: None)
    return app


def _defaults(values: Mapping[str, Any]) -> str:
    """Return the defaults as text for the help.

    >>> _defaults({"paper": 250, "quick": 8}), _defaults({"paper": (70, 140), "quick": (70, 140)})
    ('paper: 250; quick: 8', '70,140')
    """
    texts = {name: setting_text(value) for name, value in values.items()}
    if len(set(texts.values())) > 1:
        return "; ".join(f"{name}: {text}" for name, text in texts.items())
    return "".join(set(texts.values()))


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn an error in writing inside the ``with`` into one that names ``folder``."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--out: expected a folder that can be written to, got {str(folder)!r}: {error.strerror or error}"
        ) from error


def make_writable(folder: Path) -> None:
    """Create ``folder`` if it is missing and check that it is writable before time is spent on its content."""
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
