"""The parts of a model that can be removed: the importance that they lose, and what their masks leave alone."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from loco_ext import sparsity
from loco_ext.sparsity.budget.structure import log_importance_lost, structure_of
from tests.compaction.cases import Network
from tests.sparsity.budget.networks import IMAGE, conv

X = torch.zeros(2, *IMAGE)


def test_removing_the_least_important_filters_loses_their_importance_or_more_from_a_layer_nearly_empty() -> None:
    importance = np.random.default_rng(0).exponential(size=7)
    importance[3] = 0.0
    rings = np.array([0.0, 0.25, 1.0])  # part of a filter that each choice loses
    falls = log_importance_lost(importance[:, None] * rings, np.arange(7))
    np.testing.assert_allclose(falls, falls[:, -1:] * rings)
    order = importance.argsort()
    for count in range(7):
        kept = importance[order[count:]].sum() / importance.sum()
        np.testing.assert_allclose(falls[order[:count], -1].sum(), -importance.sum() * np.log(kept), atol=1e-12)
    assert falls.max() > 10 * importance.sum()  # the fall of the last filter
    assert not log_importance_lost(np.zeros((3, 2)), np.arange(3)).any()


def test_filters_of_one_class_count_as_one() -> None:
    rings, classes = np.array([0.0, 0.25, 1.0]), np.array([5, 5, 2, 2, 7, 7])
    falls = log_importance_lost(np.array([9.0, 1, 2, 2, 5, 8])[:, None] * rings, classes)
    np.testing.assert_allclose(falls, falls[:, -1:] * rings)
    of_classes = [falls[classes == each, -1].sum() for each in (2, 5, 7)]  # of importance 4, 10 and 13
    np.testing.assert_allclose(of_classes, 27 * np.log([27 / 23, 23 / 13, 1e6]))


def test_norms_of_means_over_channels_keep_their_shifts() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        y = net.first(x).relu()
        return net.last(y * net.gate(net.norm(y.mean(1, keepdim=True))).sigmoid()).mean((2, 3))

    norm = nn.BatchNorm2d(1)
    model = Network(function, first=conv(3, 12), norm=norm, gate=conv(1, 1), last=conv(12, 4)).eval()
    norm.bias.data[:], norm.running_mean.data[:] = 0.7, 0.3  # type: ignore[union-attr]
    smaller, _ = sparsity.shrink_to(model, X, macs=0.5, importance="norm")
    assert smaller.get_submodule("norm").state_dict() == norm.state_dict()


def test_norms_of_added_channels_keep_their_shifts() -> None:
    added = nn.ZeroPad3d((0, 0, 0, 0, 2, 2))  # four channels
    model = nn.Sequential(conv(3, 8), added, nn.BatchNorm2d(12), nn.ReLU(), conv(12, 4)).eval()
    structure = structure_of(model, [X], "half", "filters")
    assert not structure.masks([np.zeros(len(layer.writes), int) for layer in structure.layers]).shapes()
