"""Tables of the committed results: in README.md, between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``.

    python -m bench.tables            rewrites README.md
    python -m bench.tables --check    exits with 1 if that would change it

Figures in a section are never typed by hand.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import efcn_tables, frontier_tables, harness, tables_block_sparse, tables_ring_prox
from bench.table import MISSING, RULE_NAMES, Table, milliseconds, significant, targets

README = harness.ROOT / "README.md"
SECTION = re.compile(r"(<!-- bench:(\w+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
GPU_CASE = ["network", "rule", "dtype", "mode"]


def case(record: dict[str, Any]) -> list[str]:
    """Return the cells that say what was measured."""
    return [record["network"], RULE_NAMES[record["rule"]], str(record["threads"])]


def times(report: dict[str, Any]) -> Table:
    """Return a table of medians: uniform decay and, after the slash, with the decay map."""
    pairs = {f"torch {name}": (f"torch_{name}", f"torch_{name}_map") for name in ("loop", "foreach", "fused")}
    pairs["ours"] = ("ours_uniform", "ours_loco")
    rows = [
        case(record) + [" / ".join(milliseconds(record, name) for name in pair) for pair in pairs.values()]
        for record in report["results"]
    ]
    title = "Milliseconds for one step (median): uniform decay / with the decay map, which torch needs by hand"
    return Table(title, ["network", "rule", "threads", *pairs], rows)


def ratios(report: dict[str, Any]) -> Table:
    """Return a table of ratios, one column for each ratio that some record has."""
    names = list(dict.fromkeys(name for record in report["results"] for name in record["ratios"]))
    rows = [
        case(record) + [f"{record['ratios'][name]:.2f}" if name in record["ratios"] else MISSING for name in names]
        for record in report["results"]
    ]
    title = (
        "Ratios of times, in the median over rounds that called all once; below 1, the first is faster. loco: ours "
        "with the map, uniform: ours without"
    )
    return Table(title, ["network", "rule", "threads", *names], rows)


def bandwidths(report: dict[str, Any]) -> Table:
    """Return a table of the share of triad's bandwidth that a step of the large tensor reaches."""
    records = [record for record in report["results"] if "bandwidth" in record]
    names = list(dict.fromkeys(name for record in records for name in record["bandwidth"]))
    rows = [
        case(record)[1:]
        + [f"{rate['bytes_per_second'] / 1e9:.1f} ({rate['of_triad']:.0%})" for rate in record["bandwidth"].values()]
        for record in records
    ]
    title = (
        "One tensor of 400 MB: GB/s and share of triad's, counting only the traffic that a step cannot avoid. Triad "
        "also fetches what it overwrites, hence shares above 100%; update (a += s*b) does not"
    )
    return Table(title, ["rule", "threads", *(name.replace("_", " ") for name in names)], rows)


def peaks(report: dict[str, Any]) -> Table:
    """Return a table of the extra memory of a step, in units of the parameters."""
    records = report["peak_memory"]
    names = list(dict.fromkeys(record["candidate"] for record in records))
    cells: dict[str, dict[str, str]] = {}
    for record in records:
        extra = record["extra_bytes"]
        cell = MISSING if extra is None else f"{extra / record['parameter_bytes']:.2f}"
        cells.setdefault(record["rule"], {})[record["candidate"]] = cell
    rows = [[RULE_NAMES[rule], *(row[name] for name in names)] for rule, row in cells.items()]
    title = "The same tensor: memory that a step takes for itself at its peak, in sizes of the tensor"
    return Table(title, ["rule", *(name.replace("_", " ") for name in names)], rows)


def train(report: dict[str, Any]) -> list[Table]:
    """Return a table of samples per second of the training loop."""
    names = list(report["results"][0]["samples_per_second"])
    rows = [
        [record["model"], str(record["threads"])]
        + [f"{record['samples_per_second'][name]:,.0f}" for name in names]
        + [f"{record['overhead']:+.1%}"]
        for record in report["results"]
    ]
    title = "Samples per second (median), 32x32 images: batches alone, a plain torch loop given its batches, and ours"
    return [Table(title, ["model", "threads", *names, "time of ours over plain"], rows)]


def locality_cifar10(report: dict[str, Any]) -> list[Table]:
    """Return tables of the arms' test errors, and of the factors that they were trained with."""
    settings = report["settings"]
    rows = []
    for name, arm in report["arms"].items():
        s = arm["summary"]
        difference = [MISSING, MISSING]
        if "paired_p" in s:
            difference = [f"{s['difference']:+.2f} ± {s['difference_standard_error']:.2f}", f"{s['paired_p']:.2f}"]
        factors = "; ".join(
            f"{layer}: {', '.join(f'{f:.2f}' for f in fs)}" for layer, fs in (arm["locality"] or {}).items()
        )
        rows.append([name, f"{s['error']:.2f} ± {s['standard_error']:.2f}", *difference, factors or "1, 1"])
    title = (
        f"CIFAR-10, small CNN, {settings['epochs']} epochs, {settings['seeds']} paired seeds: test error in percent, "
        "mean and standard error; factors (gamma, eta) by layer, estimated from the uniform networks' weights "
        f"({settings['stat']})"
    )
    return [Table(title, ["decay", "test error", "minus uniform", "paired p", "factors"], rows)]


def compact(report: dict[str, Any]) -> list[Table]:
    """Return a table of latencies of networks with half of their multiply-adds removed, unchanged and compacted."""
    names = list(report["results"][0]["candidates"])
    ratios = ["speedup", "speedup_norms_kept", "speedup_over_folded"]
    rows = [
        [record["network"], record["pattern"], record["memory_format"], str(record["threads"])]
        + [f"{record['multiply_adds'][key] / record['multiply_adds']['before']:.2f}" for key in ("after", "executed")]
        + [milliseconds(record, name) for name in names]
        + [f"{record[ratio]:.2f}" for ratio in ratios]
        for record in report["results"]
    ]
    title = (
        f"Latency in ms of {report['settings']['batch_size']} images of 32x32 pixels, shares of the multiply-adds that "
        "are left and that are executed; how many times faster the compacted network is than the network, the same "
        "with its batch normalisations kept, and than the network with them folded"
    )
    shares, times = ["left", "executed"], ["times faster", "norms kept", "than folded"]
    return [Table(title, ["network", "struck", "format", "threads", *shares, *names, *times], rows)]


def zoo(report: dict[str, Any]) -> list[Table]:
    """Return a table of the speedup of torchvision's and timm's networks with half of their filters zeroed."""
    rows = [
        [record["network"]]
        + [f"{record['multiply_adds'][key] / record['multiply_adds']['before']:.2f}" for key in ("after", "executed")]
        + [milliseconds(record, name) for name in ("network", "compacted")]
        + [f"{record[key]:.2f}" for key in ("speedup", "speedup_reported")]
        + [f"{record['compaction_seconds']:.0f}", f"{record['error']:.0e}"]
        for record in report["results"]
    ]
    title = (
        "Latency in ms of one image of 224x224 pixels, one thread, before and after compaction; shares of the "
        "multiply-adds that are left and executed; seconds that compaction takes; difference in float64"
    )
    headers = ["network", "left", "executed", "ms", "compacted", "times faster", "reported", "seconds", "difference"]
    return [Table(title, headers, rows)]


def frontier_cifar10(report: dict[str, Any]) -> list[Table]:
    """Return tables of errors of pruned and narrower networks, of warm starts, and of the effect of batch norms."""
    return _filled(frontier_tables.of(report))


def trained_cifar10(report: dict[str, Any]) -> list[Table]:
    """Return a table of the speedup by compaction of networks that were trained with a penalty."""
    return _filled([frontier_tables.compacted(report)])


def efcn_cifar10(report: dict[str, Any]) -> list[Table]:
    """Return tables of networks between convolution and full connection: accuracies, the loss nearby, paths to them."""
    return _filled(efcn_tables.of(report))


def efcn_paths(report: dict[str, Any]) -> list[Table]:
    """Return a table of paths between networks of the eFCN experiment."""
    return _filled([efcn_tables.interpolations(report["networks"])])


def _filled(parts: list[efcn_tables.Parts]) -> list[Table]:
    return [
        Table(title, headers, [[MISSING if cell is None else cell for cell in row] for row in rows])
        for title, headers, rows in parts
    ]


def gpu_times(report: dict[str, Any]) -> Table:
    """Return a table of microseconds per step: of the GPU and, after the slash, of the host."""
    names = candidates(report)

    def cell(record: dict[str, Any], name: str) -> str:
        found = record["candidates"].get(name)
        return " / ".join(significant(1e6 * found[key]["median"]) for key in ("gpu", "host")) if found else MISSING

    rows = [gpu_case(record) + [cell(record, name) for name in names] for record in report["results"]]
    title = "Microseconds for one step (median): of the GPU, caches cold / of the host to hand it over"
    return Table(title, GPU_CASE + [name.replace("_", " ") for name in names], rows)


def gpu_shares(report: dict[str, Any]) -> Table:
    """Return a table of the bandwidth of the steps, in percent of a copy's."""
    names = candidates(report)
    rows = [
        gpu_case(record)
        + [f"{record['bandwidth'][name]['of_copy']:.0%}" if name in record["bandwidth"] else MISSING for name in names]
        for record in report["results"]
    ]
    title = "Bandwidth beside that of a device copy, counting only the traffic that a step cannot avoid"
    return Table(title, GPU_CASE + [name.replace("_", " ") for name in names], rows)


def gpu_ratios(report: dict[str, Any]) -> Table:
    """Return a table of ratios of step times, one column for each ratio that some record has."""
    names = list(dict.fromkeys(name for record in report["results"] for name in record["ratios"]["step"]))
    rows = []
    for record in report["results"]:
        found = record["ratios"]["step"]
        rows.append(gpu_case(record) + [f"{found[name]:.2f}" if name in found else MISSING for name in names])
    title = "Ratios of times of a step; below 1, the first is faster. Eager: GPU or host, the longer; graph: GPU"
    return Table(title, GPU_CASE + names, rows)


def gpu_case(record: dict[str, Any]) -> list[str]:
    """Return the cells under GPU_CASE."""
    return [record["network"], RULE_NAMES[record["rule"]], record["dtype"], record["mode"]]


def candidates(report: dict[str, Any]) -> list[str]:
    """Return the candidates that some record has."""
    return list(dict.fromkeys(name for record in report["results"] for name in record["candidates"]))


def description(report: dict[str, Any]) -> str:
    """Return machine, versions and bandwidth in one paragraph."""
    machine = report["machine"]
    if "gpu" in machine:
        return gpu_description(report)
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
    machine = report["machine"]
    return (
        f"{machine['gpu']} ({machine['multiprocessors']} multiprocessors, L2 {machine['l2_bytes'] / 2**20:.0f} MB), "
        f"device copy {report['copy_bandwidth']['median'] / 1e9:,.0f} GB/s; host {machine['cpu']}. "
        f"Driver {machine['driver']}, CUDA {machine['cuda']}, torch {machine['torch']}, triton {machine['triton']}; "
        f"{version(machine)}. Parameters, gradients and states have the dtype named; all columns of a row ran "
        "interleaved in one process. Percentiles are in the JSON file." + not_measured(report)
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


def optim_step(report: dict[str, Any]) -> list[Table]:
    """Return all tables of that benchmark; those without rows are left out."""
    return [table for table in (times(report), ratios(report), bandwidths(report), peaks(report)) if table.rows]


def optim_step_gpu(report: dict[str, Any]) -> list[Table]:
    """Return all tables of that benchmark; those without rows are left out."""
    tables = (targets(report, "Targets of the CUDA step"), gpu_times(report), gpu_shares(report), gpu_ratios(report))
    return [table for table in tables if table.rows]


RENDERERS = {
    "optim_step": optim_step,
    "train": train,
    "locality_cifar10": locality_cifar10,
    "compact": compact,
    "zoo": zoo,
    "frontier_cifar10": frontier_cifar10,
    "trained_cifar10": trained_cifar10,
    "efcn_cifar10": efcn_cifar10,
    "efcn_paths": efcn_paths,
    "optim_step_gpu": optim_step_gpu,
    "ring_prox": tables_ring_prox.ring_prox,
    "ring_prox_gpu": tables_ring_prox.ring_prox_gpu,
    "block_sparse": tables_block_sparse.block_sparse,
    "block_sparse_gpu": tables_block_sparse.block_sparse_gpu,
}
# Text of a section without committed results.
_NO_GPU = "No GPU has been measured yet; `make device-check` on a machine with one does that."
NOTHING_YET = {
    "compact": "Not measured yet; `make bench` does that.",
    "zoo": "Not measured yet; `python -m bench.bench_zoo` does that where torchvision and timm are installed.",
    "trained_cifar10": "Not run yet; `python -m bench.trained_cifar10 --data DIR` does that.",
    "efcn_cifar10": "Not run yet; `python -m bench.efcn_cifar10 --data DIR` does that.",
    "efcn_paths": "Not run yet; `python -m bench.efcn_paths_cifar10 --data DIR` does that.",
    "optim_step_gpu": _NO_GPU,
    "ring_prox": "Not measured yet; `make bench` does that.",
    "ring_prox_gpu": _NO_GPU,
    "block_sparse": "Not measured yet; `make bench` does that.",
    "block_sparse_gpu": _NO_GPU,
}


def show(report: dict[str, Any], console: Console) -> None:
    """Print a report's tables to a terminal."""
    console.print(description(report))
    for table in RENDERERS[report["benchmark"]](report):
        console.print(table.rich())


def publish(report: dict[str, Any], out: Path | None) -> None:
    """Write a report, if a path is given, and print its tables."""
    if out is not None:
        harness.write_json(out, report)
        print(f"written: {out}", file=sys.stderr)
    show(report, Console())


def section(name: str, results: Path) -> str:
    """Return the Markdown of every committed result of one benchmark."""
    parts = []
    for path in sorted(results.glob(f"{name}-*.json")):
        report = json.loads(path.read_text())
        parts += [description(report), *(table.markdown() for table in RENDERERS[name](report))]
    if not parts and name in NOTHING_YET:
        parts = [NOTHING_YET[name]]
    return "".join(f"\n{part}\n" for part in parts) + "\n"


def render(text: str, results: Path) -> str:
    """Return ``text`` with every section between markers replaced.

    Raises:
        ValueError: ``text`` has no markers, or one of an unknown benchmark.
    """
    names = [match[2] for match in SECTION.finditer(text)]
    unknown = sorted(set(names) - set(RENDERERS))
    if not names or unknown:
        raise ValueError(f"text: expected markers of {', '.join(RENDERERS)}, got {', '.join(unknown) or 'none'}")
    return SECTION.sub(lambda match: match[1] + section(match[2], results) + match[3], text)


def main(argv: Sequence[str] | None = None, readme: Path = README, results: Path = harness.RESULTS) -> int:
    """Rewrite or check ``readme``."""
    parser = argparse.ArgumentParser(prog="python -m bench.tables", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file is out of date")
    arguments = parser.parse_args(argv)
    old = readme.read_text()
    new = render(old, results)
    if arguments.check:
        if new != old:
            print(f"{readme.name} is out of date: run python -m bench.tables", file=sys.stderr)
        return int(new != old)
    if new != old:
        readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
