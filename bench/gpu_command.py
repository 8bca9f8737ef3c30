"""The command lines of the benchmarks that need a GPU."""

import argparse
import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import harness, machine, tables
from loco_ext.ops import backends

Report = dict[str, Any]
Run = Callable[[argparse.Namespace, Callable[[Report], None]], Report]


@dataclass(frozen=True)
class Command:
    """The command line of one benchmark.

    Args:
        name: name of its module; without "bench_" also of its committed file.
        description: the module's docstring.
        options: values that can be selected, by option; all are selected by default.
        family, backend: kernels and backend that must be able to run on the GPU.
    """

    name: str
    description: str
    options: Mapping[str, Collection[str]]
    family: str
    backend: str

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse the command line."""
        description = self.description.splitlines()[0]
        parser = argparse.ArgumentParser(prog=f"python -m bench.{self.name}", description=description)
        for name, choices in self.options.items():
            parser.add_argument(f"--{name}", nargs="*", choices=choices, default=list(choices))
        parser.add_argument("--quick", action="store_true", help="few rounds")
        parser.add_argument("--out", type=Path, help=f"JSON file; a full run has bench/results/{self.file}-<gpu>.json")
        return parser.parse_args(argv)

    @property
    def file(self) -> str:
        """Return the prefix of the names of its committed files."""
        return self.name.removeprefix("bench_")

    def is_full(self, arguments: argparse.Namespace) -> bool:
        """Return whether everything is measured for long enough; only then the committed file is written by default."""
        asked = {name: set(getattr(arguments, name)) for name in self.options}
        return not arguments.quick and asked == {name: set(choices) for name, choices in self.options.items()}

    def main(
        self, argv: Sequence[str] | None, run: Callable[[argparse.Namespace, Callable[[Report], None]], Report]
    ) -> int:
        """Measure by ``run(arguments, save)``, write the JSON file, print tables; return 2 where that is impossible."""
        arguments = self.parse(argv)
        reason = machine.no_gpu() or backends.missing(self.family, self.backend, "cuda")
        if reason is not None:
            print(f"{self.name}: {reason}", file=sys.stderr)
            return 2
        out = arguments.out
        if out is None and self.is_full(arguments):
            out = harness.RESULTS / f"{self.file}-{machine.slug(machine.gpu()['gpu'])}.json"
        report = run(arguments, functools.partial(harness.write_json, out) if out is not None else lambda _: None)
        tables.publish(report, out)
        return 0
