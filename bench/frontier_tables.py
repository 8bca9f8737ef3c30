"""The tables of the frontier on CIFAR-10, as titles, headers and rows of cells; None where nothing was measured."""

from typing import Any

from loco_ext.experiments.figures import error

SHARES = (1.0, 0.75, 0.5, 0.25, 0.1)  # share of the dense network's multiply-adds
BATCH_NORMS = ("live", "scaled", "folded")
Cells = list[str | None]
Parts = tuple[str, list[str], list[Cells]]


def of(report: dict[str, Any]) -> list[Parts]:
    """Return the tables of errors by share of multiply-adds, of warm starts, and of the effect of batch norms."""
    settings = report["settings"]
    tables = [
        table(model, arms, settings) for model, arms in report["networks"].items() for table in (errors, latencies)
    ]
    for arms in report["networks"].values():
        if "rings prox, live" in arms:
            tables += [paths(arms), norms(arms)]
    return tables


def errors(model: str, arms: dict[str, Any], settings: dict[str, Any]) -> Parts:
    """Return the table of the lowest error of each method by the share of multiply-adds that a network may have."""
    whole = arms["width"]["paths"][0]["multiply_adds"]
    rows: list[Cells] = []
    for name, record in arms.items():
        if "," in name:
            continue
        points = [point for path in record["paths"] for point in path["points"]]
        raw = [point | {"refitted": None} for point in points]
        shares = [point["multiply_adds"] / whole for point in points]
        if name.startswith("width"):
            rows.append([name, *lowest(points, shares)])
        else:
            rows.append([f"{name}, not refitted", *lowest(raw, shares)])
            rows += [[f"{name}, refitted", *lowest(points, shares)]] if points[0]["refitted"] else []
    title = (
        f"{model}, {settings['training_samples']:,} training images: lowest test error in percent "
        f"({settings['test_samples']:,} images) of the networks with at most so many of the {whole:,} multiply-adds. "
        f"All but those not refitted have been trained for {settings['epochs']} epochs"
    )
    return title, ["method", *(f"{share:.0%}" for share in SHARES), "networks"], rows


def latencies(model: str, arms: dict[str, Any], settings: dict[str, Any]) -> Parts:
    """Return the same by the share of a compacted network's time; pruned networks are timed beside the dense one."""
    dense = arms["width"]["paths"][0]["latency"]
    rows: list[Cells] = []
    for name in ("width", "rings prox"):
        points = [point for path in arms[name]["paths"] for point in path["points"]]
        whole = [dense if name == "width" else point["latency_before"] for point in points]
        shares = [point["latency_after"] / time for point, time in zip(points, whole, strict=True)]
        rows.append([name, *lowest(points, shares)])
    title = (
        f"{model}, one thread: lowest test error in percent of the networks that take at most so much of "
        f"{1e3 * dense:.2f} ms, the time of the dense one for {arms['width']['latency_batch']} images; rings refitted"
    )
    return title, ["method", *(f"{share:.0%}" for share in SHARES), "networks"], rows


def lowest(points: list[dict[str, Any]], shares: list[float]) -> Cells:
    """Return the lowest error of points within each of SHARES, and the number of networks it is chosen from."""
    cells: Cells = []
    for most in SHARES:
        allowed = [error(point) for point, share in zip(points, shares, strict=True) if share <= most]
        cells.append(f"{min(allowed):.1f}" if allowed else None)
    return [*cells, str(len(points))]


def paths(arms: dict[str, Any]) -> Parts:
    """Return the table of how much of the network is left along the paths from the strength that leaves nothing."""
    rows: list[Cells] = []
    for name in ("rings prox, dense", "rings prox, down"):
        (path,) = arms[name]["paths"]
        for point in path["points"]:
            share = point["multiply_adds"] / path["multiply_adds"]
            cells = [f"{point['strength']:.2g}", live_kernels(point), f"{share:.1%}", f"{error(point):.1f}"]
            rows.append([path["path"], *cells])
    title = "From the strength that leaves nothing, found by trial, down: each from the dense network, or from the last"
    return title, ["start", "strength", "kernels left", "multiply-adds", "test error"], rows


def norms(arms: dict[str, Any]) -> Parts:
    """Return the table of norms of weights, and of their effect, by treatment of batch norms, at the same strengths."""
    rows: list[Cells] = []
    for kind in BATCH_NORMS:
        if f"rings prox, {kind}" not in arms:
            continue
        (path,) = arms[f"rings prox, {kind}"]["paths"]
        for point in reversed(path["points"]):
            values = (number(point["metrics"][name]) for name in ("weight_norm", "effective_norm"))
            share = point["multiply_adds"] / path["multiply_adds"]
            cells = [f"{point['strength']:g}", *values, live_kernels(point), f"{share:.1%}", f"{error(point):.1f}"]
            rows.append([kind, *cells])
    title = (
        "Batch normalisation live, live with the penalty scaled by it, and folded; all from the dense network, two "
        "epochs, no refit. Norms are means over the kernels left, of weights and of weights times the scale behind them"
    )
    headers = ["batch norm", "strength", "norm", "norm times scale", "kernels left", "multiply-adds", "test error"]
    return title, headers, rows


def compacted(report: dict[str, Any]) -> Parts:
    """Return the table of times of trained networks, unchanged and compacted."""
    rows: list[Cells] = []
    for model, record in report["networks"].items():
        (path,) = record["paths"]
        for point in path["points"]:
            share = point["multiply_adds"] / path["multiply_adds"]
            times = point["latency_before"], point["latency_after"]
            cells = [f"{point['strength']:g}", live_kernels(point), f"{share:.1%}", f"{error(point):.1f}"]
            rows.append([model, *cells, *(f"{1e3 * time:.2f}" for time in times), f"{times[0] / times[1]:.2f}"])
    settings, batch = report["settings"], next(iter(report["networks"].values()))["latency_batch"]
    title = (
        f"{settings['training_samples']:,} training images, "
        f"{settings['dense_epochs']} epochs dense and one for each strength, one thread: milliseconds for {batch} "
        "images of the network as it is, and compacted; test error in percent"
    )
    headers = ["network", "strength", "kernels left", "multiply-adds", "test error", "ms", "compacted", "times faster"]
    return title, headers, rows


def live_kernels(point: dict[str, Any]) -> str:
    """Return the number of kernels left in all convolutions."""
    return str(sum(sum(counts[1:]) for counts in point["kernels"].values()))


def number(value: float | None) -> str:
    """Format a number with two significant digits; a dash where nothing was measured."""
    return "-" if value is None else f"{value:.2g}"
