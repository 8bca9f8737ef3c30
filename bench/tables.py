"""Tables of the committed results of the benchmarks, between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``.

    python -m bench.tables            rewrites docs/benchmarks.md and the summary in README.md
    python -m bench.tables --check    exits with 1 if that would change them

Figures in a section are never typed by hand.
"""

import sys
from collections.abc import Callable, Sequence

from bench import generated, harness, summary
from bench.table import (
    MISSING,
    RULE_NAMES,
    Columns,
    Record,
    Table,
    columns_of,
    entry,
    microseconds,
    milliseconds,
    significant,
    table,
    targets,
)

PASSES = {"forward": "forward", "training": "forward and backward"}
NETWORK: Columns = [("network", entry("network"))]
RULE: Columns = [("rule", lambda record: RULE_NAMES[record["rule"]])]
THREADS: Columns = [("threads", entry("threads"))]
STEP = NETWORK + RULE + THREADS
GPU_STEP = NETWORK + RULE + [("dtype", entry("dtype")), ("mode", entry("mode"))]
LAYER: Columns = [("layer", entry("layer")), ("batch", entry("batch")), ("pass", lambda record: PASSES[record["pass"]])]


def optim_step(report: Record) -> list[Table]:
    """Return tables of step times, their ratios, bandwidths, and the extra memory of a step."""
    results = report["results"]

    def pair(*names: str) -> Callable[[Record], str]:
        def cell(record: Record, name: str) -> str:
            return milliseconds(record["candidates"][name]) if name in record["candidates"] else MISSING

        return lambda record: " / ".join(cell(record, name) for name in names)

    times = [(f"torch {name}", pair(f"torch_{name}", f"torch_{name}_map")) for name in ("loop", "foreach", "fused")]
    times.append(("ours", pair("ours_uniform", "ours_loco")))
    large = [record for record in results if "bandwidth" in record]

    def rate(found: Record) -> str:
        return f"{found['bytes_per_second'] / 1e9:.1f} ({found['of_triad']:.0%})"

    memory: dict[str, Record] = {}
    for record in report["peak_memory"]:
        extra = record["extra_bytes"]
        of_rule = memory.setdefault(record["rule"], {"rule": record["rule"], "extra": {}})
        of_rule["extra"][record["candidate"]] = None if extra is None else extra / record["parameter_bytes"]
    return [
        table(
            "Milliseconds for one step (median): uniform decay / with the decay map, which torch needs by hand",
            results,
            STEP + times,
        ),
        table(
            "Ratios of times, in the median over rounds that called all once; below 1, the first is faster. loco: ours "
            "with the map, uniform: ours without",
            results,
            STEP + columns_of(results, "ratios", "{:.2f}".format),
        ),
        table(
            "One tensor of 400 MB: GB/s and share of triad's, counting only the traffic that a step cannot avoid. "
            "Triad also fetches what it overwrites, hence shares above 100%; update (a += s*b) does not",
            large,
            RULE + THREADS + columns_of(large, "bandwidth", rate),
        ),
        table(
            "The same tensor: memory that a step takes for itself at its peak, in sizes of the tensor",
            list(memory.values()),
            RULE + columns_of(list(memory.values()), "extra", "{:.2f}".format),
        ),
    ]


def train(report: Record) -> list[Table]:
    """Return a table of samples per second of the training loop."""
    results = report["results"]
    columns = [("model", entry("model")), *THREADS]
    columns += columns_of(results, "samples_per_second", lambda value: f"{value:,.0f}")
    columns.append(("time of ours over plain", entry("overhead", "+.1%")))
    title = "Samples per second (median), 32x32 images: batches alone, a plain torch loop given its batches, and ours"
    return [table(title, results, columns)]


def macs_share(key: str) -> Callable[[Record], str]:
    """Return a cell with the share of a network's MACs."""
    return lambda record: f"{record['macs'][key] / record['macs']['before']:.2f}"


def compact(report: Record) -> list[Table]:
    """Return a table of latencies of networks with half of their MACs removed, unchanged and compacted."""
    results = report["results"]
    columns = [*NETWORK, ("struck", entry("pattern")), ("format", entry("memory_format")), *THREADS]
    columns += [("left", macs_share("after")), ("executed", macs_share("executed"))]
    columns += columns_of(results, "candidates", milliseconds)
    columns += [("times faster", entry("speedup", ".2f")), ("norms kept", entry("speedup_norms_kept", ".2f"))]
    columns.append(("than folded", entry("speedup_over_folded", ".2f")))
    title = (
        f"Latency in ms of {report['settings']['batch_size']} images of 32x32 pixels, shares of the MACs that "
        "are left and that are executed; how many times faster the compacted network is than the network, the same "
        "with its batch normalisations kept, and than the network with them folded"
    )
    return [table(title, results, columns)]


def zoo(report: Record) -> list[Table]:
    """Return a table of the speedup of torchvision's and timm's networks with half of their filters zeroed."""
    columns = [*NETWORK, ("left", macs_share("after")), ("executed", macs_share("executed"))]
    columns.append(("ms", lambda record: milliseconds(record["candidates"]["network"])))
    columns.append(("compacted", lambda record: milliseconds(record["candidates"]["compacted"])))
    columns += [("times faster", entry("speedup", ".2f")), ("reported", entry("speedup_reported", ".2f"))]
    columns += [("seconds", entry("compaction_seconds", ".0f")), ("difference", entry("error", ".0e"))]
    title = (
        "Latency in ms of one image of 224x224 pixels, one thread, before and after compaction; shares of the "
        "MACs that are left and executed; seconds that compaction takes; difference in float64"
    )
    return [table(title, report["results"], columns)]


def optim_step_gpu(report: Record) -> list[Table]:
    """Return tables of step times of GPU and host, bandwidths, and ratios of step times."""
    results = report["results"]
    steps = [record | {"step_ratios": record["ratios"]["step"]} for record in results]
    return [
        targets(report, "Targets of the CUDA step"),
        table(
            "Microseconds for one step (median): of the GPU, caches cold / of the host to hand it over",
            results,
            GPU_STEP + columns_of(results, "candidates", microseconds),
        ),
        table(
            "Bandwidth beside that of a device copy, counting only the traffic that a step cannot avoid",
            results,
            GPU_STEP + columns_of(results, "bandwidth", lambda rate: f"{rate['of_copy']:.0%}"),
        ),
        table(
            "Ratios of times of a step; below 1, the first is faster. Eager: GPU or host, the longer; graph: GPU",
            steps,
            GPU_STEP + columns_of(steps, "step_ratios", "{:.2f}".format),
        ),
    ]


def ring_prox(report: Record) -> list[Table]:
    """Return tables of the prox alone, its ratios, and the optimizer step with and without a ring penalty."""
    results, steps = report["results"], report["steps"]
    case = [("penalty", entry("case")), *THREADS]
    times = columns_of(steps, "candidates", milliseconds)
    return [
        targets(report, "Targets"),
        table(
            "Milliseconds for the prox alone (median), of a convolution's weight of 512 x 512 x 3 x 3",
            results,
            [*case, ("zeros after it", entry("zeros", ".0%")), *columns_of(results, "candidates", milliseconds)],
        ),
        table(
            "The same as ratios of times, in the median over rounds that called all once. Eager PyTorch by groups is "
            "the method as it is written down; by ring sums is the fastest eager code that we know",
            results,
            case + columns_of(results, "ratios", "{:.1f}".format),
        ),
        table(
            "Milliseconds for one step (median) without a penalty, with RingPenalty on the convolutions of more than "
            "one tap, and on all convolutions; ratios within rounds",
            steps,
            STEP
            + [(name.replace("spatial", "more than one tap"), cell) for name, cell in times]
            + columns_of(steps, "ratios", "{:.2f}".format),
        ),
    ]


def ring_prox_gpu(report: Record) -> list[Table]:
    """Return tables of the prox alone, with its bandwidth, and of the optimizer step with and without a penalty."""
    results, steps = report["results"], report["steps"]
    case = [("penalty", entry("case")), ("dtype", entry("dtype"))]
    return [
        table(
            "Microseconds for the prox alone (median), of a convolution's weight of 512 x 512 x 3 x 3: of the GPU, "
            "caches cold / of the host; and bandwidth beside that of a device copy, counting only the traffic that "
            "none can avoid",
            results,
            case
            + columns_of(results, "candidates", microseconds)
            + columns_of(results, "of_copy", "{:.0%}".format, " / copy"),
        ),
        table(
            "Microseconds for one step (median) without a penalty, with RingPenalty on the convolutions of more than "
            "one tap, and on all, called one by one (eager) or replayed from a CUDA graph: of the GPU / of the host; "
            "ratios of the longer of the two, of graphs the GPU's",
            steps,
            NETWORK
            + RULE
            + [("mode", entry("mode"))]
            + columns_of(steps, "candidates", microseconds)
            + columns_of(steps, "ratios", "{:.2f}".format),
        ),
    ]


def block_sparse(report: Record) -> list[Table]:
    """Return tables of times, ratios, and the memory of a call beyond its results."""
    results, memory = report["results"], report["memory"]
    case = LAYER + THREADS
    return [
        targets(report, "Targets of block-sparse multiplication"),
        table("Milliseconds (median)", results, case + columns_of(results, "candidates", milliseconds)),
        table(
            "The same as ratios of times, in the median over rounds that called all once",
            results,
            case + columns_of(results, "ratios", "{:.2f}".format),
        ),
        table(
            "Memory that a call takes beyond operands and results, of the size of the activations",
            memory,
            LAYER + columns_of(memory, "share", "{:.1%}".format),
        ),
    ]


def block_sparse_gpu(report: Record) -> list[Table]:
    """Return a table of times beside the floor, and of ratios within rounds."""
    results = report["results"]
    columns = [*LAYER, ("arithmetic", entry("arithmetic")), *columns_of(results, "candidates", microseconds)]
    columns.append(("floor", lambda record: significant(1e6 * record["floor"])))
    columns.append(("ours / floor", entry("of_floor", ".2f")))
    title = (
        "Microseconds (median) of the GPU, caches cold / of the host; the floor is a device copy's time for input, "
        "output and values, once for each product; ratios of the GPU's times within rounds"
    )
    wanted = "Targets of the Triton kernels, of 64 channels, 32 x 32 pixels and a batch of 250"
    return [targets(report, wanted), table(title, results, columns + columns_of(results, "ratios", "{:.2f}".format))]


def landscape(report: Record) -> list[Table]:
    """Return tables of PILCRO's routes: milliseconds, plain steps, and what training pays; then peak memory."""
    results = report["results"]
    columns = [("model", entry("model")), ("batch", entry("batch_size")), *THREADS]
    title = (
        "Milliseconds of CPU time (median) of a plain training step and of one application by each route, "
        f"which training pays once in {report['settings']['every']} steps"
    )
    ratios = columns_of(results, "speedup", "{:.2f}".format, " / ours")
    memory = [record for record in report["memory"] if record["share"]]
    peaks = "Peak memory of a step that begins with an application, with weights and momentum, over a plain step's"
    return [
        targets(report, "Targets of ours on the ResNet-18"),
        table(title, results, columns + columns_of(results, "candidates", milliseconds) + ratios),
        table(peaks, memory, columns[:2] + columns_of(memory, "share", "{:.2f}".format)),
    ]


def regions(report: Record) -> list[Table]:
    """Return tables of the times of all gradient norms, of the Gram recursion, and of numbers of probes."""
    case: Columns = [("batch", entry("batch")), *THREADS]
    results, gram, probes = report["results"], report["gram"], report["probes"]
    field: Columns = [("receptive field", lambda record: "x".join(map(str, record["field"])))]
    return [
        targets(report, "Targets of the gradient norms of all units"),
        table(
            "Milliseconds (median) for the norms of the gradients of 1,200 units in 784 inputs; ratios within rounds",
            results,
            case + columns_of(results, "candidates", milliseconds) + columns_of(results, "ratios", "{:.1f}".format),
        ),
        table(
            "Milliseconds (median) of the Gram recursion, by the number of inputs",
            gram,
            [*case, *columns_of(gram, "candidates", milliseconds), ("growth", entry("growth", ".2f"))],
        ),
        table(
            "Directions that find all gradients of stacks of 3x3 convolutions on images of 3x32x32",
            probes,
            [("layers", entry("layers")), *field, ("probes", entry("probes")), ("inputs", entry("inputs"))],
        ),
    ]


def block_sparse_estimate(report: Record) -> list[Table]:
    """Return tables of estimated times of training steps beside their floors, and of what each kernel takes."""

    def us(key: str) -> Callable[[Record], str]:
        return lambda record: significant(1e6 * record[key]) if record[key] > 0 else MISSING

    cases: Columns = [(key, entry(key)) for key in ("gpu", "layer", "batch", "arithmetic")]
    limits: Columns = [
        ("floor", us("floor")),
        ("estimate", us("estimate")),
        ("estimate / floor", lambda step: f"{step['estimate'] / step['floor']:.2f}"),
        ("casts spared", us("casts")),
        ("floor of transposes", us("transposes")),
    ]
    return [
        table(
            "Microseconds of the three products of a training step; the floor is the time in which the memory can be "
            "read and written once. Casts spared are those of float32 values under autocast. NCHW images are "
            "transposed besides, for which the last column has the floor",
            report["results"],
            cases + limits,
        ),
        table(
            "What each kernel takes for the first layer: instructions of the main loop, registers of a thread, warps, "
            "programs that fit on a multiprocessor, programs, MB that they read and write in L2, what bounds the "
            "estimate, and microseconds",
            report["kernels"],
            [
                *cases,
                *((key, entry(key)) for key in ("product", "loop", "registers", "warps", "resident", "programs")),
                ("L2 MB", lambda record: f"{record['l2_bytes'] / 1e6:.0f}"),
                ("bound", entry("bound")),
                ("us", us("estimate")),
            ],
        ),
    ]


RENDERERS = {
    function.__name__: function
    for function in (
        optim_step,
        train,
        landscape,
        compact,
        zoo,
        optim_step_gpu,
        ring_prox,
        ring_prox_gpu,
        block_sparse,
        block_sparse_gpu,
        block_sparse_estimate,
        regions,
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite or check docs/benchmarks.md and the summary in README.md."""
    pages = {
        generated.DOCS / "benchmarks.md": generated.all_sections(RENDERERS, harness.RESULTS),
        generated.README: {"summary": summary.section(harness.RESULTS)},
    }
    return generated.main("bench", pages, argv)


if __name__ == "__main__":
    sys.exit(main())
