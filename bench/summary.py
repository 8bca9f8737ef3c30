"""A few figures of the committed results, for README.md: ours beside what one would use otherwise."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.table import Record, Table, significant


@dataclass(frozen=True)
class Figure:
    """Two candidates of one record of a benchmark's report: ours and a peer.

    Attributes:
        benchmark: its name.
        case: entries that only this record has.
        what: the text about ours.
        ours, peer: names of the candidates.
        beside: the text about the peer.
        records: the entry of the report that has the record.
    """

    benchmark: str
    case: dict[str, Any]
    what: str
    ours: str
    peer: str
    beside: str
    records: str = "results"


RESNET_50 = {"network": "resnet50", "rule": "adamw"}
LAYER = {"layer": "64-64 3x3 at 16", "pass": "training"}
COMPACT = {"network": "resnet18", "pattern": "kernels", "memory_format": "channels_last"}
ADAMW, FUSED = "AdamW step of ResNet-50", "torch's fused AdamW, without locality"
WITH_LOCALITY = f"{ADAMW} with a locality"
IN_A_GRAPH = RESNET_50 | {"dtype": "float32", "mode": "graph"}
PROX = "prox of `RingPenalty`, weight of 512 x 512 x 3 x 3"
COMPACTED = "ResNet-18 compacted to half of its MACs, 32 images"
CONNECTED = "locally connected 3x3 layer, 64 channels, 16x16 pixels, forward and backward, batch"
GPU_LAYER = {"layer": "64-64 3x3 at 32", "pass": "training", "batch": 250, "arithmetic": "bfloat16"}
CONNECTED_ON_GPU = "the same for 32x32 pixels in bfloat16, batch 250"
PILCRO = "training step of ResNet-18, PILCRO at every tenth, mean"
NORMS = "norms of the gradients of 1,200 units, 8 samples"
FIGURES = [
    Figure("optim_step", RESNET_50, WITH_LOCALITY, "ours_loco", "torch_fused", FUSED),
    Figure(
        "optim_step", RESNET_50, WITH_LOCALITY, "ours_loco", "torch_fused_map", "torch's, and the decay map by hand"
    ),
    Figure("ring_prox", {"case": "half rings"}, PROX, "ours", "torch_rings", "fastest eager PyTorch that we know"),
    Figure("ring_prox", {"case": "half rings"}, PROX, "ours", "spams", "SPAMS"),
    Figure("ring_prox", RESNET_50, f"{ADAMW} and this prox", "all", "without", "the step alone", "steps"),
    Figure("compact", COMPACT, COMPACTED, "compacted", "network", "the network itself"),
    Figure("block_sparse", LAYER | {"batch": 64}, f"{CONNECTED} 64", "ours NHWC", "conv2d NHWC", "conv2d"),
    Figure("block_sparse", LAYER | {"batch": 1}, f"{CONNECTED} 1", "ours NHWC", "conv2d NHWC", "conv2d"),
    Figure("block_sparse_gpu", GPU_LAYER, CONNECTED_ON_GPU, "ours", "conv2d NHWC", "conv2d"),
    Figure("landscape", {"model": "resnet18"}, PILCRO, "ours", "plain step", "the same without PILCRO"),
    Figure("regions", {"batch": 8}, NORMS, "ours", "vmap_jacrev", "`vmap(jacrev)`"),
    Figure(
        "optim_step_gpu", IN_A_GRAPH, f"{WITH_LOCALITY}, float32, in a CUDA graph", "cuda_loco", "torch_fused", FUSED
    ),
]


def section(results: Path) -> str:
    """Return the Markdown of the table."""
    rows = [row for figure in FIGURES for row in rows_of(figure, results)]
    title = (
        "Milliseconds (medians). Both times of a row were interleaved in one process; different rows may be from "
        "different machines of the same name. On CPUs in float32 and one thread, on GPUs their own time, caches cold"
    )
    table = Table(title, ["what", "ms", "compared with", "its ms", "measured on"], rows)
    return f"\n{table.markdown()}\n\n"


def rows_of(figure: Figure, results: Path) -> Iterator[list[str]]:
    """Yield the row of each committed result that has the figure."""
    for path in sorted(results.glob(f"{figure.benchmark}-*.json")):
        report = json.loads(path.read_text())
        wanted = figure.case | ({} if "gpu" in report["machine"] else {"threads": 1})
        for record in report[figure.records]:
            if wanted.items() <= record.items():
                ours, peer = (significant(1e3 * seconds(record, name)) for name in (figure.ours, figure.peer))
                yield [figure.what, ours, figure.beside, peer, machine(report)]


def seconds(record: Record, name: str) -> float:
    """Return the median time of a candidate; of a regulariser that few steps apply, the mean over all steps."""
    share, candidate = record.get("amortised", {}).get(name), record["candidates"][name]
    return candidate.get("gpu", candidate)["median"] if share is None else share * seconds(record, "plain step")


def machine(report: Record) -> str:
    """Return CPU or GPU, and torch, in a few words."""
    facts = report["machine"]
    if "gpu" in facts:
        return f"{facts['gpu']}, torch {facts['torch']}, Triton {facts['triton']}"
    return f"{facts['cpu']}, {facts['cores']} cores, {facts['cpu_capability']}, torch {facts['torch']}"
