"""Tables of the committed results of the studies, between ``<!-- studies:NAME -->`` and ``<!-- /studies -->``.

python -m studies.tables            rewrites docs/studies.md, docs/papers.md and the networks in README.md
python -m studies.tables --check    exits with 1 if that would change them
"""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import generated, machine
from bench.table import MISSING, Table
from loco_ext.analysis.corruptions import FAMILIES
from loco_ext.experiments.records import Record, with_error
from loco_ext.experiments.regions import NORMS
from loco_ext.output import cell
from studies import papers

RESULTS = Path(__file__).parent / "results"
mean = partial(with_error, missing=MISSING)
number = partial(cell, form=".3g", missing=MISSING)  # with three significant digits
SHARES = (1.0, 0.75, 0.5, 0.25, 0.1)  # share of the dense network's MACs
PEER = "Torch-Pruning, global"
OURS = ("shrink_to", 0.5)
HALVES = {("dense", 1.0): "dense", ("uniform width", 0.5): "fewer channels", OURS: "`shrink_to`"}
HALVES |= {("Budget", 0.5): "`Budget`"}
HALVES |= {("shrink_to, by fours", 0.5): "`shrink_to(..., round_to=4)`"}
HALVES |= {("shrink_to, latency", 0.5): "`shrink_to(..., latency=...)`"}
HALVES |= {("Budget, latency", 0.5): "`Budget(..., latency=...)`", (PEER, 0.5): PEER}
EFCN_NAMES = {"cnn": "CNN", "lcn": "LCN", "full": "eFCN", "fcn": "FCN from scratch"}


def locality_cifar10(report: Record) -> list[Table]:
    """Return the table of the arms' test errors and of the factors that they were trained with."""
    settings = report["settings"]
    rows = []
    for name, arm in report["arms"].items():
        factors = "; ".join(
            f"{layer}: {', '.join(f'{f:.2f}' for f in fs)}" for layer, fs in (arm["locality"] or {}).items()
        )
        rows.append([name, *_compared(arm["summary"], ".2f"), factors or "1, 1"])
    title = (
        f"CIFAR-10, small CNN, {settings['epochs']} epochs, {settings['seeds']} paired seeds: test error in percent, "
        "mean and standard error; factors (gamma, eta) by layer, estimated from the uniform networks' weights "
        f"({settings['stat']})"
    )
    return [Table(title, ["decay", "test error", "minus uniform", "paired p", "factors"], rows)]


def locality_sizes_cifar10(report: Record) -> list[Table]:
    """Return the table of the test errors of each cell and arm."""
    rows = []
    for trained in report["cells"]:
        for arm, s in trained["arms"].items():
            row = [f"{trained['images']:,}", f"{trained['kernel']}x{trained['kernel']}", trained["optimizer"]]
            rows.append([*row, f"{s['strength']:g}", arm, *_compared(s, ".2g"), str(s["count"])])
    title = (
        "CIFAR-10, small CNN of half width: test error in percent, mean and standard error, and its paired difference "
        "from uniform decay, whose strength was chosen on held-out training images"
    )
    headers = [
        "images",
        "kernels",
        "optimizer",
        "strength",
        "decay",
        "test error",
        "minus uniform",
        "paired p",
        "seeds",
    ]
    return [Table(title, headers, rows)]


def _compared(summary: Record, form: str) -> list[str]:
    """Return the cells of a mean error, of its difference from another arm's, and of the p-value in this form."""
    both = mean(summary | {"mean": summary["error"]}, ".2f"), mean(summary, "+.2f", name="difference")
    return [*both, cell(summary.get("paired_p"), form, MISSING)]


def frontier_cifar10(report: Record) -> list[Table]:
    """Return tables of errors of pruned and narrower networks, of warm starts, and of the effect of batch norms."""
    settings, tables = report["settings"], []
    for model, arms in report["networks"].items():
        tables += [errors(model, arms, settings), latencies(model, arms)]
    for arms in report["networks"].values():
        if "rings prox, live" in arms:
            tables += [paths(arms), norms(arms)]
    return tables


def errors(model: str, arms: Record, settings: Record) -> Table:
    """Return the table of the lowest error of each method by the share of MACs that a network may have."""
    whole = arms["width"]["paths"][0]["macs"]
    rows = []
    for name, record in arms.items():
        if "," in name:
            continue
        points = [point for path in record["paths"] for point in path["points"]]
        shares = [point["macs"] / whole for point in points]
        if name.startswith("width"):
            rows.append([name, *lowest(map(error, points), shares)])
            continue
        rows.append([f"{name}, not refitted", *lowest([point["error"] for point in points], shares)])
        if points[0]["refitted_error"] is not None:
            rows.append([f"{name}, refitted", *lowest(map(error, points), shares)])
    title = (
        f"{model}, {settings['training_samples']:,} training images: lowest test error in percent "
        f"({settings['test_samples']:,} images) of the networks with at most this share of the {whole:,} MACs. "
        f"All but those not refitted have been trained for {settings['epochs']} epochs"
    )
    return Table(title, ["method", *(f"{share:.0%}" for share in SHARES), "networks"], rows)


def latencies(model: str, arms: Record) -> Table:
    """Return the table of the lowest error by share of the dense network's time; pruned ones are timed beside it."""
    dense = arms["width"]["paths"][0]["latency"]
    rows = []
    for name in ("width", "rings prox"):
        points = [point for path in arms[name]["paths"] for point in path["points"]]
        shares = [p["latency_after"] / (dense if name == "width" else p["latency_before"]) for p in points]
        rows.append([name, *lowest(map(error, points), shares)])
    title = (
        f"{model}, one thread: lowest test error in percent of the networks that take at most so much of "
        f"{1e3 * dense:.2f} ms, the time of the dense one for {arms['width']['latency_batch']} images; rings refitted"
    )
    return Table(title, ["method", *(f"{share:.0%}" for share in SHARES), "networks"], rows)


def lowest(found: Any, shares: list[float]) -> list[str]:
    """Return the lowest error within each of SHARES, and the number of networks it is chosen from."""
    networks = list(zip(found, shares, strict=True))
    cells = []
    for most in SHARES:
        allowed = [error for error, share in networks if share <= most]
        cells.append(f"{min(allowed):.1f}" if allowed else MISSING)
    return [*cells, str(len(networks))]


def error(point: Record) -> float:
    """Return the test error of a point in percent, after its refit if it had one."""
    return point["error"] if point["refitted_error"] is None else point["refitted_error"]


def paths(arms: Record) -> Table:
    """Return the table of what is left of the network along the paths that begin where nothing is left."""
    rows = []
    for name in ("rings prox, dense", "rings prox, down"):
        (path,) = arms[name]["paths"]
        rows += [[path["path"], f"{point['strength']:.2g}", *left(point, path)] for point in path["points"]]
    title = "From the strength that leaves nothing, found by trial, down: each from the dense network, or from the last"
    return Table(title, ["start", "strength", "filters left", "MACs", "test error"], rows)


def norms(arms: Record) -> Table:
    """Return the table of norms of weights, alone and times the scales of batch norms, by treatment of these."""
    rows = []
    for kind in ("live", "scaled", "folded"):
        if f"rings prox, {kind}" not in arms:
            continue
        (path,) = arms[f"rings prox, {kind}"]["paths"]
        for point in reversed(path["points"]):
            values = (point[name] for name in ("weight_norm", "effective_norm"))
            cells = [cell(value, ".2g", "-") for value in values]
            rows.append([kind, f"{point['strength']:g}", *cells, *left(point, path)])
    title = (
        "Batch normalisation live, live with the penalty scaled by it, and folded; all from the dense network, two "
        "epochs, no refit. Norms are means over the filters left, of weights and of weights times the scale behind them"
    )
    headers = ["batch norm", "strength", "norm", "norm times scale", "filters left", "MACs", "test error"]
    return Table(title, headers, rows)


def trained_cifar10(report: Record) -> list[Table]:
    """Return the table of times of networks that were trained with a penalty, unchanged and compacted."""
    rows = []
    for model, record in report["networks"].items():
        (path,) = record["paths"]
        for point in path["points"]:
            before, after = point["latency_before"], point["latency_after"]
            times = [f"{1e3 * before:.2f}", f"{1e3 * after:.2f}", f"{before / after:.2f}"]
            rows.append([model, f"{point['strength']:g}", *left(point, path), *times])
    settings, batch = report["settings"], next(iter(report["networks"].values()))["latency_batch"]
    title = (
        f"{settings['training_samples']:,} training images, "
        f"{settings['dense_epochs']} epochs dense and one for each strength, one thread: milliseconds for {batch} "
        "images of the network as it is, and compacted; test error in percent"
    )
    headers = ["network", "strength", "filters left", "MACs", "test error", "ms", "compacted", "times faster"]
    return [Table(title, headers, rows)]


def left(point: Record, path: Record) -> list[str]:
    """Return the cells of what is left of a network: filters, share of the MACs, and the test error."""
    return [str(point["filters"]), f"{point['macs'] / path['macs']:.1%}", f"{error(point):.1f}"]


def efcn_cifar10(report: Record) -> list[Table]:
    """Return tables of networks between convolution and full connection: accuracies, step times, the loss nearby."""
    return [accuracies(report), steps(report), landscapes(report)]


def accuracies(report: Record) -> Table:
    """Return the table of the accuracy that each network reaches and its deviation from the convolutions."""
    rows = []
    for network in report["networks"]:
        last = network["last"]
        shares = ("delta_locality", "delta_sharing", "local_accuracy", "off_local_accuracy")
        rows.append(
            [
                *case(network),
                f"{network['parameters']:,}",
                str(network["epochs"]),
                percent(network["start"]["test_accuracy"]),
                percent(last["test_accuracy"]),
                number(last["train_loss"]),
                *(percent(last.get(name)) for name in shares),
            ]
        )
    samples = f"{report['training_samples']:,} training and {report['test_samples']:,} test images"
    title = (
        f"VanillaCNN, {samples}, one seed. Test "
        "accuracy in percent before the first and after the last epoch; training loss of the last epoch, while "
        "weights change; shares of the norm in percent; test accuracy with the other blocks masked"
    )
    headers = ["network", "from epoch", "parameters", "epochs", "at first", "in the end", "training loss"]
    headers += ["delta locality", "delta sharing", "local blocks", "other blocks"]
    return Table(title, headers, rows)


def steps(report: Record) -> Table:
    """Return the table of training times."""
    seconds, batch = report["step_seconds"], report["settings"]["lcn"]["training"]["batch_size"]
    rows = [[title(name), number(1e3 * time), number(time / seconds["cnn"])] for name, time in seconds.items()]
    text = f"A training step of {batch} images, one thread, all in one run: median milliseconds, and over the CNN's"
    return Table(text, ["network", "ms", "of the CNN"], rows)


def landscapes(report: Record) -> Table:
    """Return the table of gradient norms and curvatures before and after training."""
    names = ("gradient_norm", "top_eigenvalue", "residual")
    rows = [
        [*case(network), *(number(network[when].get(name)) for name in names for when in ("before", "after"))]
        for network in report["networks"]
        if network["before"]
    ]
    text = (
        "The training loss around the weights, before and after that training: norm of the gradient, largest "
        "eigenvalue of the Hessian, and its relative residual"
    )
    headers = [f"{name} {when}" for name in ("gradient", "eigenvalue", "residual") for when in ("before", "after")]
    return Table(text, ["network", "from epoch", *headers], rows)


def efcn_paths(report: Record) -> list[Table]:
    """Return the table of the best values on each path between networks of the eFCN experiment, ends included."""
    rows = []
    for network in report["networks"]:
        methods = network["methods"]
        accuracies = [*methods["linear"]["ends"], *(path["best"] for path in methods.values())]
        barriers = [cell(path["highest_loss"], ".3g", "inf") for path in methods.values()]
        rows.append([*case(network), *map(percent, accuracies), *barriers])
    text = (
        "Paths from the trained CNN to networks trained on: test accuracies of their ends and the highest on each, in "
        "percent, chosen on the test images; the highest training loss on each"
    )
    names = ("linear", "string", "outputs")
    headers = ["network", "from epoch", "CNN", "network itself", *names, *(f"loss, {name}" for name in names)]
    return [Table(text, headers, rows)]


def landscapes_cifar10(report: Record) -> list[Table]:
    """Return the tables of arms trained with PILCRO and without: what they reach, and how they stand corruption."""
    seeds, reached, robust = report["settings"]["seeds"], [], []
    forms = {"loss": ".2f", "total_variation": ".4f", "ablation": ".3f", "spearman": ".2f"}
    for arm, figures in report["arms"].items():
        accuracy = mean(figures["accuracy"], ".1f", 100), mean(figures["accuracy"], "+.1f", 100, name="difference")
        reached.append([arm, *accuracy, *(mean(figures[name], form) for name, form in forms.items())])
        families = [mean(figures[family], ".1f", 100) for family in FAMILIES]
        by_family = report["curves"][arm]["kept_probability"]
        kept = [f"{np.mean(np.array(by_family[family], float)):.2f}" for family in FAMILIES]
        robust.append([arm, *families, *kept])
    title = (
        f"Small CNN, {report['training_samples']:,} training and {report['test_samples']:,} test images, "
        f"{report['settings']['training']['epochs']} epochs, paired seeds: {seeds}; means and standard errors: test "
        "accuracy in percent and its difference from plain; test loss; total variation of the landscape (before "
        f"training {report['total_variation_at_first']:.4f}); area under the ablation curve; rank correlation of "
        "Lemma 1's two importances"
    )
    headers = ["arm", "accuracy", "minus plain", "loss", "TV", "ablation", "Lemma 1"]
    text = (
        f"Corrupted test images ({report['settings']['corrupted_images']}), means over corruptions and levels: "
        "accuracy in percent; then what is left of the label's probability, for images classified correctly clean"
    )
    families = [*FAMILIES, *(f"{family}, kept" for family in FAMILIES)]
    return [Table(title, headers, reached), Table(text, ["arm", *families], robust)]


def case(network: Record) -> list[str]:
    """Return the cells that name the network and the epoch after which it was lifted."""
    time = network["switch_time"]
    return [title(network["relax"]), cell(time, "d", MISSING)]


def title(relax: str) -> str:
    """Return the name of a lifted network."""
    return EFCN_NAMES.get(relax, f"grown by {relax}")


def percent(value: float | None) -> str:
    """Format a share in percent with one decimal."""
    return MISSING if value is None else f"{100 * value:.1f}"


def regions_digits(report: Record) -> list[Table]:
    """Return the table of accuracies and radii of linear regions, with and without ROLL."""
    rows = []
    for arm in report["arms"]:
        kind = "without" if arm["hinge"] is None else f"{arm['strength']:g}, {arm['hinge']:g}, {arm['top_percent']}"
        radii = [mean(arm["median_radius"][p], ".2g") for p in NORMS]
        rows.append([kind, mean(arm["accuracy"], ".2f", 100), *radii, *(mean(arm["ratio"][p], ".2f") for p in NORMS)])
    settings = report["settings"]
    title = (
        f"{report['training_samples']} training and {report['test_samples']:,} test digits, "
        f"{settings['layers']} layers of {settings['units']} units, {settings['epochs']} epochs, {settings['seeds']} "
        "paired seeds: test accuracy "
        "in percent, median radius over the test samples in pixels of [0, 1], its ratio to the networks without "
        "ROLL; means and standard errors"
    )
    headers = ["ROLL: strength, hinge, percent", "accuracy", *(f"p = {p}" for p in NORMS)]
    return [Table(title, [*headers, *(f"ratio, p = {p}" for p in NORMS)], rows)]


def budget_cifar10(report: Record) -> list[Table]:
    """Return the table of the test errors of each way to a network of a budget."""
    settings, rows = report["settings"], []
    for arm in report["arms"]:
        differences = {
            reference == PEER: " ± ".join(
                f"{value:{sign}.2f}" for value, sign in zip(each.values(), ("+", ""), strict=False)
            )
            for reference, each in arm["differences"].items()
        }
        compared = [differences.get(peer, MISSING) for peer in (False, True)]
        latencies = _ratios(arm)
        row = [f"{arm['share']:.0%}", arm["way"], f"{arm['error']:.2f}", *compared, str(arm["networks"])]
        rows.append([*row, f"{arm['macs']:.1%}", *latencies])
    branches = report.get("branches", "convolutions")
    title = (
        f"CIFAR-10, {settings['model']}{'' if branches == 'convolutions' else f' with {branches}'}, "
        f"{report['training_samples']:,} training images, {settings['epochs']} epochs: "
        "test error in percent, mean over runs; paired differences from uniform width (distilled if the way is, "
        f"from the dense network for 100%) and from {PEER}, mean and standard error, of one pair the difference; MACs "
        "and latency of the compacted network over those of the dense one"
    )
    timed = [f"latency, {name}" for name in report["arms"][0]["latencies"]]
    return [Table(title, ["budget", "way", "error", "from width", "from Torch-Pruning", "runs", "MACs", *timed], rows)]


def _ratios(arm: Record) -> list[str]:
    return [cell(ratio, ".2f", MISSING) for ratio in arm["latencies"].values()]


def halves(results: Path) -> str:
    """Return the Markdown of README.md's networks of half of the MACs, of the study of most networks and images."""
    reports = [json.loads(path.read_text()) for path in results.glob("budget_cifar10-*.json")]
    report = max(reports, key=lambda each: (_arms(each).get(OURS, {}).get("networks", 0), each["training_samples"]))
    arms, settings = _arms(report), report["settings"]
    rows = [
        [name, f"{arm['error']:.1f}%", str(arm["networks"]), f"{arm['macs']:.0%}", *_ratios(arm)]
        for key, name in HALVES.items()
        if (arm := arms.get(key)) is not None
    ]
    title = (
        f"CIFAR-10, {settings['model']}, {report['training_samples']:,} training images, {settings['epochs']} epochs; "
        "MACs and latency over those of the dense network"
    )
    timed = [f"latency, {name}" for name in report["arms"][0]["latencies"]]
    table = Table(title, ["network", "test error", "runs", "MACs", *timed], rows)
    return f"\n{table.markdown()}\n\n"


def _arms(report: Record) -> dict[tuple[str, float], Record]:
    return {(arm["way"], arm["share"]): arm for arm in report["arms"]}


RENDERERS = {
    function.__name__: function
    for function in (
        locality_cifar10,
        locality_sizes_cifar10,
        frontier_cifar10,
        trained_cifar10,
        efcn_cifar10,
        efcn_paths,
        landscapes_cifar10,
        regions_digits,
        budget_cifar10,
    )
}


def publish(name: str, out: Path, **content: Any) -> None:
    """Write the report of a study, with the facts of this machine, and print its tables."""
    generated.publish({"benchmark": name, "machine": machine.describe()} | content, out, RENDERERS)


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite or check docs/studies.md, docs/papers.md and README.md."""
    pages = {
        generated.DOCS / "studies.md": generated.all_sections(RENDERERS, RESULTS),
        papers.PAGE: papers.sections(),
        generated.README: {"halves": halves(RESULTS)},
    }
    return generated.main("studies", pages, argv)


if __name__ == "__main__":
    sys.exit(main())
