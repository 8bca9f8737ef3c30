"""Times of layers between those that were measured against SciPy, and what is measured."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.interpolate import interpn
from torch import nn

from loco_ext.sparsity.budget import layer_time
from loco_ext.sparsity.budget.layer_time import LayerTime, LayerTimes, time_layer


def test_times_are_linear_in_the_inputs_and_those_of_the_next_number_of_filters() -> None:
    rng = np.random.default_rng(0)
    sizes = [((2.0, 4, 6, 7), (2.0, 4, 6, 8, 9, 9, 9, 9)), ((1.0, 2, 3, 3), (8.0, 16, 24, 32, 40, 48, 56, 64))]
    tables = [LayerTime(*map(np.asarray, size), rng.uniform(1, 2, (4, 8)).cumsum(0).cumsum(1)) for size in sizes]
    times = LayerTimes(tables)
    for i, (inputs, filters, seconds) in enumerate(tables):
        rows, columns = (len(np.unique(each)) for each in (inputs, filters))
        inputs, filters, seconds = inputs[:rows], filters[:columns], seconds[:rows, :columns]
        widths, counts = np.arange(inputs[0], inputs[-1] + 1), np.arange(1, filters[-1] + 1)
        above = filters[np.searchsorted(filters, counts)]
        points = np.stack(np.meshgrid(widths, above, indexing="ij"), -1)
        expected = interpn((inputs, filters), seconds, points)
        found = times(np.asarray([[i]]), widths[:, None], counts[None])
        np.testing.assert_allclose(found, expected)
        assert not times(np.asarray([i]), widths, np.zeros(1)).any()
        assert (times(np.asarray([i]), np.zeros(1), counts) >= 0).all()


@pytest.mark.parametrize(
    ("module", "shape", "inputs", "filters"),
    [
        (nn.Conv2d(6, 20, 3), (2, 6, 9, 9), [2, 4, 6, 6], [4, 8, 12, 16, 20, 20, 20, 20]),
        (nn.Conv1d(1, 3, 3, padding="same"), (6, 9), [1] * 4, [1, 2, 3, 3, 3, 3, 3, 3]),
        (nn.Conv3d(4, 4, 2, groups=4, padding_mode="circular"), (1, 4, 3, 3, 3), [1] * 4, [1, 2, 3, 4, 4, 4, 4, 4]),
        (nn.Conv2d(8, 6, 3, groups=2, bias=False), (1, 8, 5, 5), [4] * 4, [3, 6, 6, 6, 6, 6, 6, 6]),
        (nn.ConvTranspose2d(6, 20, 3, 2, bias=False), (2, 6, 9, 9), [2, 4, 6, 6], [4, 8, 12, 16, 20, 20, 20, 20]),
        (nn.Linear(7, 64), (2, 3, 7), [2, 4, 6, 7], [8, 16, 24, 32, 40, 48, 56, 64]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_fewer_channels_are_timed(
    module: Any, shape: tuple[int, ...], inputs: list[int], filters: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = {"shape": shape, "dtype": torch.float32, "device": torch.device("cpu"), "channels_last": False}
    real = layer_time.seconds_of, layer_time.seconds_of_layer
    seen = []

    def seconds_of(convolution: Any, kind: Any) -> float:
        assert real[0](convolution, kind) > 0
        seen.append(len(convolution.weight))
        return float(convolution.weight.numel() - 100 * (len(convolution.weight) == 4))  # four filters look fast

    def seconds_of_layer(layer: Any, kind: Any) -> float:
        assert real[1](layer, kind) > 0
        assert layer.bias is not None
        return float(layer.weight.numel())

    monkeypatch.setattr(layer_time, "seconds_of", seconds_of)
    monkeypatch.setattr(layer_time, "seconds_of_layer", seconds_of_layer)
    time = time_layer(module, [kind])
    assert time.inputs.tolist() == inputs
    assert time.filters.tolist() == filters
    assert (np.diff(time.seconds, axis=0) >= 0).all()
    assert (np.diff(time.seconds, axis=1) >= 0).all()
    assert time.seconds[-1, -1] == module.weight.numel() - 100 * (seen[-1:] == [4])
