"""Pictures of linear regions: radius against accuracy, and the regions of networks of the plane.

The toy problem is after figure 1 of Lee, Alvarez-Melis, Jaakkola, "Towards Robust, Locally Linear Deep Networks" (ICLR
2019): the same network trained without a regulariser, with the margin loss and with its relaxation ROLL.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from loco_ext.experiments.figures import write
from loco_ext.experiments.models import fully_connected
from loco_ext.output import progress_bar
from loco_ext.regularizers import ROLL, MarginLoss, region_radius
from loco_ext.regularizers.frozen import FrozenNetwork
from loco_ext.regularizers.linear_regions import region_patterns

TOY_UNITS, TOY_LAYERS, TOY_POINTS, TOY_STEPS = 32, 3, 40, 600
PIXELS = 300  # length of each side of a picture of the plane


def draw(record: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Yield ``regions`` with the figure of the median radius of each setting against its test accuracy."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for plain in (False, True):
        measured = [arm for arm in record["arms"] if arm["median_radius"]["2"]["mean"] is not None]
        found = [arm for arm in measured if (arm["strength"] == 0) is plain]
        x = [arm["accuracy"]["mean"] for arm in found]
        y = [arm["median_radius"]["2"]["mean"] for arm in found]
        axes.plot([100 * value for value in x], y, "s" if plain else "o", label="vanilla" if plain else "ROLL")
    axes.set(xlabel="test accuracy in percent", ylabel="median radius, p = 2", yscale="log")
    axes.legend()
    yield "regions", figure


def toy_data() -> tuple[Tensor, Tensor]:
    """Return points of the plane in two classes that no line separates."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(TOY_POINTS, 2, generator=generator) * 2 - 1
    return x, (torch.sin(4 * x[:, 0]) / 2 < x[:, 1]).long()


def toy_network(loss: Callable[[nn.Module, Tensor], Tensor] | None, label: str) -> nn.Module:
    """Return a trained network of the plane."""
    x, y = toy_data()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = fully_connected([2, *[TOY_UNITS] * TOY_LAYERS], 2)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    with progress_bar(TOY_STEPS, label, unit="step") as bar:
        for _ in range(TOY_STEPS):
            value = cross_entropy(model(x), y)
            if loss is not None:
                value = value + loss(model, x)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            bar.update()
    return model


def save_toy(path: Path) -> None:
    """Draw the linear regions of three networks of the plane, with the largest circles around the training points."""
    losses = {"vanilla": None, "margin loss": MarginLoss(0.2), "ROLL": ROLL(0.1, 5.0)}
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    for axes, (name, loss) in zip(figure.subplots(1, 3), losses.items(), strict=True):
        draw_regions(axes, toy_network(loss, f"toy, {name}"), name)
    write(figure, path)


def draw_regions(axes: Axes, model: nn.Module, name: str) -> None:
    """Draw each linear region in a colour of its own, and the training points with their circles."""
    x, y = toy_data()
    line = torch.linspace(-1.1, 1.1, PIXELS)
    plane = torch.cartesian_prod(line, line)[:, [1, 0]]  # rows of the picture are the second coordinate
    with torch.no_grad():
        patterns = region_patterns(FrozenNetwork(model, plane), plane)
        side = (model(plane)[:, 1] - model(plane)[:, 0]).view(PIXELS, PIXELS)
    _, numbers = np.unique(np.array(patterns, dtype=object), return_inverse=True)
    colors = np.random.default_rng(0).uniform(0.55, 1, (numbers.max() + 1, 3))
    extent = (-1.1, 1.1, -1.1, 1.1)
    axes.imshow(colors[numbers].reshape(PIXELS, PIXELS, 3), extent=extent, origin="lower", interpolation="nearest")
    axes.contour(line, line, side, levels=[0.0], colors="black", linewidths=1.5)
    radii = region_radius(model, x)
    for point, label, radius in zip(x.tolist(), y.tolist(), radii.tolist(), strict=True):
        color = ("tab:red", "tab:blue")[label]
        axes.plot(*point, ".", color=color, markersize=4)
        axes.add_patch(Circle(point, radius, fill=False, color=color, linewidth=0.8))
    axes.set(title=f"{name}: {numbers.max() + 1} regions, median radius {radii.median():.3f}", xticks=[], yticks=[])
    axes.set(xlim=extent[:2], ylim=extent[2:])
