"""Tables of the prox of ring penalties, on the CPU and on a GPU."""

from collections.abc import Sequence
from typing import Any

from bench.table import MISSING, RULE_NAMES, Table, milliseconds, significant, targets

Records = Sequence[dict[str, Any]]


def entries(records: Records, key: str) -> list[str]:
    """Return the names that some record has an entry for, ours and the copy last."""
    names = dict.fromkeys(name for record in records for name in record[key])
    return sorted(names, key=lambda name: name in ("ours", "copy", "ours / copy"))


def ratio(record: dict[str, Any], name: str, digits: int = 2) -> str:
    """Format a ratio, or a dash where it was not measured."""
    return f"{record['ratios'][name]:.{digits}f}" if name in record["ratios"] else MISSING


def in_words(name: str) -> str:
    """Return a candidate's name as a header."""
    return name.replace("_", " ")


def prox_times(report: dict[str, Any]) -> Table:
    """Return a table of medians of the prox alone."""
    names = entries(report["results"], "candidates")
    rows = [
        [record["case"], str(record["threads"]), f"{record['zeros']:.0%}", *(milliseconds(record, n) for n in names)]
        for record in report["results"]
    ]
    title = "Milliseconds for the prox alone (median), of a convolution's weight of 512 x 512 x 3 x 3"
    return Table(title, ["penalty", "threads", "zeros after it", *map(in_words, names)], rows)


def prox_ratios(report: dict[str, Any]) -> Table:
    """Return a table of ratios of the prox alone."""
    names = entries(report["results"], "ratios")
    rows = [
        [record["case"], str(record["threads"]), *(ratio(record, name, 1) for name in names)]
        for record in report["results"]
    ]
    title = (
        "The same as ratios of times, in the median over rounds that called all once. Eager PyTorch by groups is the "
        "method as it is written down; by ring sums is the fastest eager code that we know"
    )
    return Table(title, ["penalty", "threads", *names], rows)


def step_times(report: dict[str, Any]) -> Table:
    """Return a table of the optimizer step with and without a ring penalty."""
    columns = {"without": "without", "more than one tap": "spatial", "all": "all"}
    names = entries(report["steps"], "ratios")
    rows = [
        [record["network"], RULE_NAMES[record["rule"]], str(record["threads"])]
        + [milliseconds(record, name) for name in columns.values()]
        + [ratio(record, name) for name in names]
        for record in report["steps"]
    ]
    title = (
        "Milliseconds for one step (median) without a penalty, with RingPenalty on the convolutions of more than one "
        "tap, and on all convolutions; ratios within rounds"
    )
    return Table(title, ["network", "rule", "threads", *columns, *names], rows)


def ring_prox(report: dict[str, Any]) -> list[Table]:
    """Return all tables of that benchmark; those without rows are left out."""
    tables = (targets(report, "Targets"), prox_times(report), prox_ratios(report), step_times(report))
    return list(tables)


def microseconds(record: dict[str, Any], name: str) -> str:
    """Format the GPU's time and, after the slash, the host's; a dash where it was not run."""
    found = record["candidates"].get(name)
    return " / ".join(significant(1e6 * found[key]["median"]) for key in ("gpu", "host")) if found else MISSING


def gpu_prox(report: dict[str, Any]) -> Table:
    """Return a table of the prox alone, with the bandwidth of ours beside a copy's."""
    names = entries(report["results"], "candidates")
    shares = entries(report["results"], "of_copy")
    rows = [
        [record["case"], record["dtype"]]
        + [microseconds(record, name) for name in names]
        + [f"{record['of_copy'][name]:.0%}" if name in record["of_copy"] else MISSING for name in shares]
        for record in report["results"]
    ]
    title = (
        "Microseconds for the prox alone (median), of a convolution's weight of 512 x 512 x 3 x 3: of the GPU, caches "
        "cold / of the host; and bandwidth beside that of a device copy, counting only the traffic that none can avoid"
    )
    headers = ["penalty", "dtype", *map(in_words, names), *(f"{in_words(name)} / copy" for name in shares)]
    return Table(title, headers, rows)


def gpu_steps(report: dict[str, Any]) -> Table:
    """Return a table of the optimizer step with and without a ring penalty, on the GPU."""
    names, ratios = entries(report["steps"], "candidates"), entries(report["steps"], "ratios")
    rows = [
        [record["network"], RULE_NAMES[record["rule"]], record["mode"]]
        + [microseconds(record, name) for name in names]
        + [ratio(record, name) for name in ratios]
        for record in report["steps"]
    ]
    title = (
        "Microseconds for one step (median) without a penalty, with RingPenalty on the convolutions of more than one "
        "tap, and on all, called one by one (eager) or replayed from a CUDA graph: of the GPU / of the host; ratios of "
        "the longer of the two, of graphs the GPU's"
    )
    return Table(title, ["network", "rule", "mode", *map(in_words, names), *ratios], rows)


def ring_prox_gpu(report: dict[str, Any]) -> list[Table]:
    """Return all tables of that benchmark; those without rows are left out."""
    return [gpu_prox(report), gpu_steps(report)]
