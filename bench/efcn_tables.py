"""The tables of the eFCN experiment on CIFAR-10: titles, headers and rows of cells; None where nothing was measured."""

from typing import Any

Cells = list[str | None]
Parts = tuple[str, list[str], list[Cells]]
NAMES = {"cnn": "CNN", "lcn": "LCN", "full": "eFCN", "fcn": "FCN from scratch"}


def of(report: dict[str, Any]) -> list[Parts]:
    """Return the tables of accuracies and deviations, of training steps, and of the loss around the weights."""
    networks = report["networks"]
    own: dict[str, Any] = {"relax": "cnn", "switch_time": None, "before": {}, "after": {}}
    rows = [own | networks["cnn"], *networks["branches"], *([networks["fcn"]] if networks["fcn"] else [])]
    return [accuracies(rows, report), steps(report), landscapes(rows)]


def accuracies(networks: list[dict[str, Any]], report: dict[str, Any]) -> Parts:
    """Return the table of the accuracy that each network reaches and its deviation from the convolutions."""
    rows: list[Cells] = []
    for network in networks:
        last = network["epochs"][-1]
        shares = ("delta_locality", "delta_sharing", "local_accuracy", "off_local_accuracy")
        rows.append(
            [
                *case(network),
                f"{network['parameters']:,}",
                str(len(network["epochs"])),
                percent(network["start"]["test_accuracy"]),
                percent(last["test_accuracy"]),
                number(last["train_loss"]),
                *(percent(last.get(name)) for name in shares),
            ]
        )
    samples = f"{report['training_samples']:,} training and {report['test_samples']:,} test images"
    title = (
        f"VanillaCNN, {samples}, one seed. Test "
        "accuracy in percent when training begins and after so many epochs; training loss of the last epoch, while "
        "weights change; shares of the norm in percent; test accuracy with the other blocks masked"
    )
    headers = ["network", "from epoch", "parameters", "epochs", "at first", "in the end", "training loss"]
    headers += ["delta locality", "delta sharing", "local blocks", "other blocks"]
    return title, headers, rows


def steps(report: dict[str, Any]) -> Parts:
    """Return the table of training times."""
    seconds, batch = report["step_seconds"], report["settings"]["lcn"]["training"]["batch_size"]
    rows: list[Cells] = [
        [case({"relax": name, "switch_time": None})[0], number(1e3 * time), number(time / seconds["cnn"])]
        for name, time in seconds.items()
    ]
    title = f"A training step of {batch} images, one thread, all in one run: median milliseconds, and over the CNN's"
    return title, ["network", "ms", "of the CNN"], rows


def landscapes(networks: list[dict[str, Any]]) -> Parts:
    """Return the table of gradient norms and curvatures before and after training."""
    rows: list[Cells] = []
    for network in networks:
        parts = network["before"], network["after"]
        if parts[0]:
            names = ("gradient_norm", "top_eigenvalue", "residual")
            rows.append([*case(network), *(number(part.get(name)) for name in names for part in parts)])
    title = (
        "The training loss around the weights, before and after that training: norm of the gradient, largest "
        "eigenvalue of the Hessian, and its relative residual"
    )
    headers = [f"{name} {when}" for name in ("gradient", "eigenvalue", "residual") for when in ("before", "after")]
    return title, ["network", "from epoch", *headers], rows


def interpolations(networks: list[dict[str, Any]]) -> Parts:
    """Return the table of the best values on each path, ends included."""
    rows: list[Cells] = []
    for network in networks:
        paths = network["interpolations"]
        ends = [paths["linear"][place]["test_accuracy"] for place in (0, -1)]
        best = [max(point["test_accuracy"] for point in points) for points in paths.values()]
        barriers = [max(finite(point["train_loss"]) for point in points) for points in paths.values()]
        rows.append([*case(network), *map(percent, (*ends, *best)), *map(number, barriers)])
    title = (
        "Paths from the trained CNN to networks trained on: test accuracies of their ends and the highest on each, in "
        "percent, chosen on the test images; the highest training loss on each"
    )
    methods = ("linear", "string", "outputs")
    headers = ["network", "from epoch", "CNN", "network itself", *methods, *(f"loss, {method}" for method in methods)]
    return title, headers, rows


def case(network: dict[str, Any]) -> Cells:
    """Return the cells that name the network and the epoch after which it was lifted."""
    relax, time = network["relax"], network["switch_time"]
    return [NAMES.get(relax, f"grown by {relax}"), None if time is None else str(time)]


def finite(value: float | None) -> float:
    """Return NaN for None, JSON's null for numbers that are not finite."""
    return float("inf") if value is None else value


def percent(value: float | None) -> str | None:
    """Format a share in percent with one decimal."""
    return None if value is None else f"{100 * value:.1f}"


def number(value: float | None) -> str | None:
    """Format a number with three significant digits."""
    return None if value is None else f"{value:.3g}"
