"""Figures 1 to 3 of LOCO-REG: feature maps, filters, and where two strategies place features on a map."""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from loco_ext.analysis import localize
from loco_ext.experiments.data import load
from loco_ext.experiments.figures import write
from loco_ext.experiments.loader import Normalization
from loco_ext.experiments.models import MODELS, load_weights

SHOWN = 4  # maps and filters of each layer
SEED = 0  # seed of the choice of maps and filters
# The paper's figure 3 without its first row, of which one value is missing in the text.
MAP = (
    (0, 0, 1, 0, 0, 1, 2, 2, 1, 0, 2, 3, 1, 1, 1, 0),
    (1, 0, 0, 0, 1, 2, 6, 3, 1, 1, 2, 5, 1, 2, 1, 0),
    (0, 0, 0, 0, 1, 1, 3, 2, 2, 3, 2, 3, 2, 0, 0, 0),
    (0, 1, 0, 0, 0, 1, 2, 2, 2, 2, 3, 2, 2, 1, 0, 0),
    (0, 0, 0, 1, 0, 1, 1, 1, 2, 3, 3, 2, 1, 1, 0, 0),
)


def save(trained: Path, data: str, folder: Path | None, out: Path) -> dict[str, Path]:
    """Write the figures to ``out``, those of the small CNN where its weights exist; return their files by caption.

    Its maps are of the first test image of the data set, whose files are in ``folder``.
    """
    out.mkdir(parents=True, exist_ok=True)
    captions = {
        "Figure 1: four feature maps of each layer of a small CNN": out / "feature_maps.png",
        "Figure 2: filters of the same network": out / "filters.png",
        "Figure 3: features placed by cohesion (red) and by sums (blue)": out / "placed.png",
    }
    maps, filters, placed = captions.values()
    write(localization(), placed)
    if trained.is_file():
        dataset = load(data, folder)
        model = MODELS["small"].make(dataset.channels, dataset.classes, dataset.size)
        load_weights(model, trained)
        write(feature_maps(model.eval(), Normalization(dataset.train)(dataset.test.images[:1])), maps)
        write(filters_of(model), filters)
    return captions


@torch.no_grad()
def feature_maps(model: nn.Module, image: Tensor) -> Figure:
    """Draw some feature maps of an image [1, C, H, W] after each convolution and ReLU of a sequence of layers."""
    rows, after_convolution = [], False
    for module in model.children():
        image = module(image)
        after_convolution |= isinstance(module, nn.Conv2d)
        if after_convolution and isinstance(module, nn.ReLU):
            rows.append(image[0, _chosen(image.shape[1])])
            after_convolution = False
    return _grid(rows)


@torch.no_grad()
def filters_of(model: nn.Module) -> Figure:
    """Draw the magnitudes of some spatial kernels of each convolution."""
    rows = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            kernels = module.weight.abs().flatten(0, 1)
            rows.append(kernels[_chosen(len(kernels))])
    return _grid(rows)


def localization() -> Figure:
    """Draw the map with the two features of 3x3 that each strategy places on it."""
    values = torch.tensor(MAP, dtype=torch.float64)
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.imshow(values, cmap="Greys", vmax=2 * values.max().item())
    for row, line in enumerate(MAP):
        for column, value in enumerate(line):
            axes.text(column, row, str(value), ha="center", va="center", size="small")
    for strategy, color, inset in (("cohesion", "tab:red", 0.02), ("sum", "tab:blue", 0.1)):
        for row, column in localize(values, 2, strategy=strategy).tolist():
            corner, side = (column - 0.5 + inset, row - 0.5 + inset), 3 - 2 * inset
            axes.add_patch(Rectangle(corner, side, side, fill=False, color=color, linewidth=2))
    axes.set_axis_off()
    return figure


def _chosen(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(SEED))[:SHOWN]


def _grid(rows: list[Tensor]) -> Figure:
    """Draw a row of pictures for each layer, white for the largest value of a picture."""
    figure = Figure(figsize=(1.6 * SHOWN, 1.7 * len(rows)), layout="constrained")
    cells = figure.subplots(len(rows), SHOWN, squeeze=False)
    for number, (line, pictures) in enumerate(zip(cells, rows, strict=True), 1):
        for axes, picture in zip(line, pictures, strict=False):
            axes.imshow(picture.float().numpy(), cmap="gray", vmin=0)
            axes.set_axis_off()
        line[0].set_title(f"layer {number}", size="small", loc="left")
    return figure
