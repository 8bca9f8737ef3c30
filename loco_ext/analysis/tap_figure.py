"""Figure of the mean magnitude of a network's weights, tap by tap and layer by layer."""

import itertools
import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from loco_ext.output import one_line

_COLUMNS = 6  # pictures per row of the figure
_MOST_PICTURES = 300  # pictures in the figure
_LONGEST_TITLE = 28  # characters of a picture's title


def tap_figure(mean_abs_weight: dict[str, Tensor]) -> Figure:
    """Draw the mean absolute weight of every tap, ``[*kernel_size]`` by layer; darker is larger, from 0 to the maximum.

    The slices of a 3-d kernel stand side by side. At most the first 300 layers are drawn.
    """
    drawn = dict(itertools.islice(mean_abs_weight.items(), _MOST_PICTURES))
    columns = min(len(drawn), _COLUMNS)
    rows = math.ceil(len(drawn) / columns)
    width, height = 2.1 * columns, 2.3 * rows + 0.6
    figure = Figure(figsize=(width, height))
    some = "" if len(drawn) == len(mean_abs_weight) else f", of the first {len(drawn)} of {len(mean_abs_weight)} layers"
    figure.suptitle("Mean |weight| by tap" + some)
    # All pictures share one axes object, in inches from its upper left corner, because creating axes is slow.
    axes = figure.add_axes((0, 0, 1, 1 - 0.5 / height))
    axes.set_axis_off()
    for i, (name, taps) in enumerate(drawn.items()):
        row, column = divmod(i, columns)
        _draw_taps(axes, 2.1 * column, 2.3 * row, name, taps)
    axes.set(xlim=(0, width), ylim=(height - 0.5, 0))
    return figure


def _draw_taps(axes: Axes, left: float, top: float, name: str, taps: Tensor) -> None:
    """Draw a picture of at most 1.9 inches in either direction, below its title."""
    if taps.dim() == 3:
        taps = taps.transpose(0, 1).flatten(1)  # [height, depth * width]
    picture = taps.reshape(-1, taps.shape[-1])
    height, width = (1.9 * size / max(picture.shape) for size in picture.shape)
    x, y = left + (2.1 - width) / 2, top + 0.3 + (1.9 - height) / 2
    box = (x, x + width, y + height, y)
    axes.imshow(picture.numpy(), extent=box, vmin=0, vmax=picture.max().item() or 1, cmap="Blues")
    title = one_line(name, _LONGEST_TITLE)
    axes.text(left + 1.05, top + 0.25, title, size="small", ha="center", parse_math=False)
