"""Tables of block-sparse multiplication."""

from typing import Any

from bench.table import MISSING, Table, milliseconds, significant, targets
from bench.tables_ring_prox import entries, microseconds, ratio

PASSES = {"forward": "forward", "training": "forward and backward"}


def _case(record: dict[str, Any]) -> list[str]:
    return [record["layer"], str(record["batch"]), PASSES[record["pass"]]]


def times(report: dict[str, Any]) -> Table:
    """Return a table of medians."""
    names = entries(report["results"], "candidates")
    rows = [
        [*_case(record), str(record["threads"]), *(milliseconds(record, name) for name in names)]
        for record in report["results"]
    ]
    return Table("Milliseconds (median)", ["layer", "batch", "pass", "threads", *names], rows)


def ratios(report: dict[str, Any]) -> Table:
    """Return a table of ratios within rounds."""
    names = entries(report["results"], "ratios")
    rows = [
        [*_case(record), str(record["threads"]), *(ratio(record, name) for name in names)]
        for record in report["results"]
    ]
    title = "The same as ratios of times, in the median over rounds that called all once"
    return Table(title, ["layer", "batch", "pass", "threads", *names], rows)


def memory(report: dict[str, Any]) -> Table:
    """Return a table of the memory of a call beyond its results."""
    names = list(dict.fromkeys(name for record in report["memory"] for name in record["share"]))

    def cell(share: float | None) -> str:
        return MISSING if share is None else f"{share:.1%}"

    rows = [[*_case(record), *(cell(record["share"].get(name)) for name in names)] for record in report["memory"]]
    title = "Memory that a call takes beyond operands and results, of the size of the activations"
    return Table(title, ["layer", "batch", "pass", *names], rows)


def block_sparse(report: dict[str, Any]) -> list[Table]:
    """Return all tables of that benchmark; those without rows are left out."""
    wanted = targets(report, "Targets of block-sparse multiplication")
    return [wanted, times(report), ratios(report), memory(report)]


def gpu_times(report: dict[str, Any]) -> Table:
    """Return a table of medians beside the floor, and of ratios within rounds."""
    names, ratios = entries(report["results"], "candidates"), entries(report["results"], "ratios")
    rows = [
        [*_case(record), record["arithmetic"]]
        + [microseconds(record, name) for name in names]
        + [significant(1e6 * record["floor"]), f"{record['of_floor']:.2f}"]
        + [ratio(record, name) for name in ratios]
        for record in report["results"]
    ]
    title = (
        "Microseconds (median) of the GPU, caches cold / of the host; the floor is a device copy's time for input, "
        "output and values, once for each product; ratios of the GPU's times within rounds"
    )
    headers = ["layer", "batch", "pass", "arithmetic", *names, "floor", "ours / floor", *ratios]
    return Table(title, headers, rows)


def block_sparse_gpu(report: dict[str, Any]) -> list[Table]:
    """Return all tables of that benchmark; those without rows are left out."""
    wanted = targets(report, "Targets of the Triton kernels, of 64 channels, 32 x 32 pixels and a batch of 250")
    return [wanted, gpu_times(report)]
