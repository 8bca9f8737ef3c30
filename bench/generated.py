"""Sections of the documentation made from committed results, between ``<!-- FOLDER:NAME -->`` and ``<!-- /FOLDER -->``.

FOLDER is the package whose ``results`` hold the files NAME-*.json, and whose ``tables`` turn each into tables.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import harness
from bench.table import Table
from loco_ext.output import print_table

README = harness.ROOT / "README.md"
DOCS = harness.ROOT / "docs"
Renderers = Mapping[str, Callable[[dict[str, Any]], list[Table]]]
Pages = Mapping[Path, Mapping[str, str]]  # the Markdown of each section of a page, by the section's name


def main(folder: str, pages: Pages, argv: Sequence[str] | None = None) -> int:
    """Rewrite the folder's sections of all ``pages``, or check that they are up to date."""
    parser = argparse.ArgumentParser(prog=f"python -m {folder}.tables", description="Tables of the committed results.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    arguments = parser.parse_args(argv)
    code = 0
    for page, sections in pages.items():
        old = page.read_text()
        new = render(old, folder, sections)
        if new != old and arguments.check:
            print(f"{page.name} is out of date: run python -m {folder}.tables", file=sys.stderr)
            code = 1
        elif new != old:
            page.write_text(new)
    return code


def render(text: str, folder: str, sections: Mapping[str, str]) -> str:
    """Return ``text`` with every section of the folder replaced.

    Raises:
        ValueError: ``text`` lacks a section, or has an unknown one.
    """
    pattern = re.compile(rf"(<!-- {folder}:(\w+) -->\n).*?(<!-- /{folder} -->)", re.DOTALL)
    names = [match[2] for match in pattern.finditer(text)]
    if sorted(names) != sorted(sections):
        raise ValueError(f"text: expected markers of {', '.join(sections)}, got {', '.join(names) or 'none'}")
    return pattern.sub(lambda match: match[1] + sections[match[2]] + match[3], text)


def all_sections(renderers: Renderers, results: Path) -> dict[str, str]:
    """Return the Markdown of every section, by its name."""
    return {name: section(name, renderers, results) for name in renderers}


def section(name: str, renderers: Renderers, results: Path) -> str:
    """Return the Markdown of every committed result of one name."""
    parts = []
    for path in sorted(results.glob(f"{name}-*.json")):
        report = json.loads(path.read_text())
        parts += [description(report), *(table.markdown() for table in renderers[name](report) if table.rows)]
    return "".join(f"\n{part}\n" for part in parts or [nothing_yet(name)]) + "\n"


def nothing_yet(name: str) -> str:
    """Return the text of a section without results."""
    if name.endswith("_gpu"):
        return "No GPU has been measured yet; `make device-check` on a machine with one does that."
    return "Not measured yet."


def publish(report: dict[str, Any], out: Path | None, renderers: Renderers) -> None:
    """Write a report, if a path is given, and print its tables."""
    if out is not None:
        harness.write_json(out, report)
        print(f"written: {out}", file=sys.stderr)
    print(description(report))
    for table in renderers[report["benchmark"]](report):
        if table.rows:
            print_table(table.headers, table.rows, table.title)


def description(report: dict[str, Any]) -> str:
    """Return machine, versions and bandwidth in one paragraph."""
    machine = report["machine"]
    if "gpu" in machine:
        return gpu_description(report)
    if report["benchmark"].endswith("_estimate"):
        return (
            f"Estimates from compiled code, not measurements. Triton {machine['triton']} and its ptxas; "
            f"{version(machine)}."
        )
    caches = ", ".join(f"{level} {size}" for level, size in machine["caches"].items())
    rows = report.get("bandwidth", [])
    triad = [f"{row['triad']['median'] / 1e9:.1f} GB/s (threads: {row['threads']})" for row in rows]
    timed = "all columns of a row ran interleaved in one process. "
    if report["benchmark"] == "zoo":
        timed += f"Medians of {report['settings']['rounds']} rounds."
    else:
        timed += "Medians are averaged over places in memory and over what ran before; "
        timed += "percentiles are in the JSON file."
    return (
        f"{machine['cpu']}, {machine['cores']} cores ({caches}), {machine['cpu_capability']}"
        + (f"; triad {', '.join(triad)}" if triad else "")
        + f". torch {machine['torch']}; {version(machine)}. float32"
        + (f"; {timed}{not_measured(report)}" if "results" in report else ".")
    )


def gpu_description(report: dict[str, Any]) -> str:
    """Return GPU, versions and bandwidth in one paragraph."""
    machine, effort = report["machine"], report["settings"]
    return (
        f"{machine['gpu']} ({machine['multiprocessors']} multiprocessors, L2 {machine['l2_bytes'] / 2**20:.0f} MB), "
        f"device copy {report['copy_bandwidth']['median'] / 1e9:,.0f} GB/s; host {machine['cpu']}. "
        f"Driver {machine['driver']}, CUDA {machine['cuda']}, torch {machine['torch']}, triton {machine['triton']}; "
        f"{version(machine)}. Parameters, gradients and states have the dtype named; all columns of a row ran "
        f"interleaved in one process, for at least {effort['min_rounds']} rounds and {effort['min_seconds']:g} s. "
        "Percentiles are in the JSON file." + not_measured(report)
    )


def not_measured(report: dict[str, Any]) -> str:
    """Return a sentence about what could not be measured; empty if everything could."""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in report.get("not_measured", {}).items())
    return f" Not measured: {reasons}." if reasons else ""


def version(machine: dict[str, Any]) -> str:
    """Return our version and commit, and the date."""
    commit, _, dirty = machine["commit"].partition("-")
    commit = commit[:10] + (" with changes" if dirty else "")
    return f"loco_ext {machine['loco_ext']}, commit {commit}; {machine['date'][:10]}"
