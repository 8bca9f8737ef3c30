"""Tables of the committed results: in README.md, between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``.

    python -m bench.tables            rewrites README.md
    python -m bench.tables --check    exits with 1 if that would change it

Figures in a section are never typed by hand.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import harness, readme, tables_block_sparse, tables_ring_prox
from bench.table import MISSING, RULE_NAMES, Table, milliseconds, significant, targets

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


def optim_step(report: dict[str, Any]) -> list[Table]:
    """Return all tables of that benchmark."""
    return [times(report), ratios(report), bandwidths(report), peaks(report)]


def optim_step_gpu(report: dict[str, Any]) -> list[Table]:
    """Return all tables of that benchmark."""
    return [targets(report, "Targets of the CUDA step"), gpu_times(report), gpu_shares(report), gpu_ratios(report)]


RENDERERS = {
    "optim_step": optim_step,
    "train": train,
    "compact": compact,
    "zoo": zoo,
    "optim_step_gpu": optim_step_gpu,
    "ring_prox": tables_ring_prox.ring_prox,
    "ring_prox_gpu": tables_ring_prox.ring_prox_gpu,
    "block_sparse": tables_block_sparse.block_sparse,
    "block_sparse_gpu": tables_block_sparse.block_sparse_gpu,
}


def publish(report: dict[str, Any], out: Path | None) -> None:
    """Write a report, if a path is given, and print its tables."""
    readme.publish(report, out, RENDERERS)


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite or check README.md."""
    return readme.main("bench", RENDERERS, harness.RESULTS, argv)


if __name__ == "__main__":
    sys.exit(main())
