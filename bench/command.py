"""The command lines of the benchmarks."""

import argparse
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import harness, machine, tables
from loco_ext.experiments.malloc import keep_freed_memory
from loco_ext.ops import backends

Report = dict[str, Any]
Save = Callable[[Report], None]
# Measures what the arguments ask for; saves the unfinished report from time to time.
Run = Callable[[argparse.Namespace, Save], Report]


@dataclass(frozen=True)
class Command:
    """The command line of one benchmark.

    Args:
        name: name of its module; without "bench_" also of its committed file.
        description: the module's docstring.
        options: values that can be selected, by option; all are selected by default.
        more: further options, and the arguments of ``add_argument``.
        gpu: family of kernels and backend that must be able to run on the GPU; None for a benchmark of the CPU.
        keep_memory: whether the C library keeps freed memory for the next call, so that page faults are not measured.
    """

    name: str
    description: str
    options: Mapping[str, Collection[str]]
    more: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    gpu: tuple[str, str] | None = None
    keep_memory: bool = False

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse the command line."""
        parser = argparse.ArgumentParser(
            prog=f"python -m bench.{self.name}", description=self.description.splitlines()[0]
        )
        for name, choices in self.options.items():
            parser.add_argument(f"--{name}", nargs="*", choices=choices, default=list(choices))
        if self.gpu is None:
            parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="in ascending order")
        for name, how in self.more.items():
            parser.add_argument(f"--{name}", **how)
        parser.add_argument("--quick", action="store_true", help="few rounds")
        parser.add_argument("--out", type=Path, help="JSON file; a run without other options has one in bench/results")
        return parser.parse_args(argv)

    def main(self, argv: Sequence[str] | None, run: Run) -> int:
        """Measure by ``run``, write the JSON file, print tables; return 2 where that is impossible.

        The committed file is written by default only if everything is measured for long enough.
        """
        arguments = self.parse(argv)
        if self.gpu is not None:
            reason = machine.no_gpu() or backends.missing(*self.gpu, "cuda")
            if reason is not None:
                print(f"{self.name}: {reason}", file=sys.stderr)
                return 2
        elif os.getloadavg()[0] > 0.5:
            print("warning: something else is running, which costs threads whole time slices", file=sys.stderr)
        if self.keep_memory:
            keep_freed_memory()
        out = arguments.out
        if vars(arguments) == vars(self.parse([])):
            where = machine.cpu_model() if self.gpu is None else machine.gpu()["gpu"]
            out = harness.RESULTS / f"{self.name.removeprefix('bench_')}-{machine.slug(where)}.json"

        def save(report: Report) -> None:
            if out is not None:
                harness.write_json(out, report)

        tables.publish(run(arguments, save), out)
        return 0
