"""Compaction of views in rows of features, such as ``x.view(-1, 400)``: flattenings where each row is a sample."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from loco_ext import sparsity
from loco_ext.fx.branches import BranchError
from tests.compaction.cases import Network, convolution, same


def view_by_sizes(y: Tensor, features: int) -> Tensor:
    features = 1
    for size in y.shape[1:]:
        features *= size
    return y.view(-1, features)


ROWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "a number": lambda y, features: y.view(-1, features),
    "a number, reshaped": lambda y, features: torch.reshape(y, (-1, features)),
    "sizes": view_by_sizes,
    "the numbers of a sample": lambda y, features: y.view(-1, y[0].numel()),
}


@pytest.mark.parametrize("size", [(4, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_rows_are_samples_for_images_of_the_examples_size(
    rows: Callable[[Tensor, int], Tensor], size: tuple[int, int]
) -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        return net.linear(rows(functional.relu(net.first(x)), 8 * pixels))

    pixels = size[0] * size[1]
    model = Network(function, first=convolution(3, 8, 1), linear=nn.Linear(8 * pixels, 5)).double().eval()
    with torch.no_grad():
        model.first.weight[2:7], model.first.bias[2:7] = 0, 0
    x, more, larger = (torch.randn(n, 3, k * size[0], size[1]).double() for n, k in ((2, 1), (5, 1), (2, 2)))
    network, _ = sparsity.compact(model, x, cost="macs")
    assert network.get_submodule("linear").weight.shape == (5, 3 * pixels)
    same(network, model, x, more)
    with pytest.raises(BranchError, match=f"which it was traced, got {larger.shape[2]}"):
        network(larger)


@pytest.mark.parametrize(
    ("rows", "noted"), [(lambda y: y.view(-1, 400), True), (lambda y: y.view(-1, y[0].numel()), False)]
)
def test_a_report_says_that_images_of_other_sizes_are_refused(rows: Callable[[Tensor], Tensor], noted: bool) -> None:
    model = Network(lambda net, x: net.linear(rows(net.first(x))), first=nn.Conv2d(3, 16, 3), linear=nn.Linear(400, 5))
    _, report = sparsity.compact(model.eval(), torch.randn(2, 3, 7, 7), cost="macs")
    assert ("branches" in report.notes) == noted


def test_rows_may_be_parts_of_samples_whose_axis_1_has_any_length() -> None:
    model = Network(lambda net, x: net.linear(x).relu().view(-1, 12), linear=nn.Linear(8, 4)).double().eval()
    network, report = sparsity.compact(model, torch.randn(2, 3, 8).double(), cost="macs")
    assert report.notes.keys() == {"view"}
    same(network, model, torch.randn(2, 6, 8).double())


FEATURES: dict[str, tuple[int, Callable[[Tensor, Tensor], int]]] = {
    "another tensor": (2, lambda y, other: other.numel()),
    "all numbers": (1, lambda y, other: y.numel()),
    "half of all numbers": (2, lambda y, other: y.numel() // 2),
    "half of all numbers, flattened": (2, lambda y, other: y.flatten(1).numel() // 2),
    "the number of samples": (2, lambda y, other: y.size(0) * 48),
    "the first size": (2, lambda y, other: y.shape[-4] * 48),
}


@pytest.mark.parametrize(("samples", "features"), FEATURES.values(), ids=FEATURES)
def test_rows_that_another_size_decides_are_no_samples(samples: int, features: Callable[[Tensor, Tensor], int]) -> None:
    class Model(Network):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            y = functional.relu(self.first(x))
            return self.linear(y.view(-1, features(y, other)))

    model = Model(lambda net, x: x, first=convolution(3, 8, 1), linear=nn.Linear(96, 5)).double().eval()
    with torch.no_grad():
        model.first.weight[2:7], model.first.bias[2:7] = 0, 0
    inputs = torch.randn(samples, 3, 4, 3).double(), torch.zeros(96).double()
    network, _ = sparsity.compact(model, inputs, cost="macs")
    assert network.get_submodule("linear").weight.shape == (5, 96)
