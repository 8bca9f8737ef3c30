"""The command lines of the benchmarks."""

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import generated, harness, machine, tables
from loco_ext.experiments.malloc import keep_freed_memory
from loco_ext.ops import backends
from loco_ext.threads import num_threads

QUICK = harness.Effort(min_rounds=3, min_seconds=0.2, warmup=1, builds=1)


@dataclass(frozen=True)
class Job:
    """The request to a benchmark, and its report, which goes to the file ``out`` if there is one."""

    arguments: argparse.Namespace
    effort: harness.Effort
    report: dict[str, Any]
    out: Path | None

    def threads(self) -> Iterator[int]:
        """Yield each of the numbers of threads that are asked for while torch computes with as many."""
        for count in self.arguments.threads:
            with num_threads(count):
                yield count

    def add(self, *records: dict[str, Any], to: str = "results") -> None:
        """Append records to a list of the report, and write it, so that little is lost by an interruption."""
        self.report[to] += records
        if self.out is not None:
            harness.write_json(self.out, self.report)


@dataclass(frozen=True)
class Command:
    """The command line of one benchmark.

    Args:
        name: name of its module; without "bench_" also of its committed file.
        description: the module's docstring.
        run: measures what the job asks for and puts it into the job's report.
        options: values that can be selected, by option; all are selected by default.
        effort: how long to measure, replaced by QUICK with ``--quick``.
        gpu: family of kernels and backend that must be able to run on the GPU; None for a benchmark of the CPU.
        threads: numbers of threads by default; those of the host do not count on a GPU.
        keep_memory: whether the C library keeps freed memory for the next call, so that page faults are not measured.
    """

    name: str
    description: str
    run: Callable[[Job], None]
    options: Mapping[str, Collection[str]]
    effort: harness.Effort = field(default_factory=harness.Effort)
    gpu: tuple[str, str] | None = None
    threads: Sequence[int] = (1, 2)
    keep_memory: bool = False

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse the command line."""
        parser = argparse.ArgumentParser(
            prog=f"python -m bench.{self.name}", description=self.description.splitlines()[0]
        )
        for name, choices in self.options.items():
            parser.add_argument(f"--{name}", nargs="*", choices=choices, default=list(choices))
        if self.gpu is None:
            parser.add_argument("--threads", nargs="+", type=int, default=list(self.threads), help="in ascending order")
        parser.add_argument("--quick", action="store_true", help="few rounds")
        parser.add_argument("--out", type=Path, help="JSON file; a run without other options has one in bench/results")
        return parser.parse_args(argv)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Measure, write the JSON file, print tables; return 2 where that is impossible.

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
        gpu = {} if self.gpu is None else machine.gpu()
        name, out = self.name.removeprefix("bench_"), arguments.out
        if vars(arguments) == vars(self.parse([])):
            out = harness.RESULTS / f"{name}-{machine.slug(gpu.get('gpu') or machine.cpu_model())}.json"
        effort = QUICK if arguments.quick else self.effort
        report = {"benchmark": name, "machine": machine.describe() | gpu, "settings": asdict(effort), "results": []}
        self.run(Job(arguments, effort, report, out))
        generated.publish(report, out, tables.RENDERERS)
        return 0
