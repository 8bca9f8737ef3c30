"""Graphs read the results of in-place operations, or are refused where it is not known what these change."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from loco_ext.fx.in_place import make_out_of_place, read_results_of_writes
from loco_ext.fx.trace import UntraceableError


def on_an_alias(x: Tensor) -> Tensor:
    x = x * 2
    x.detach().relu_()
    return x


def on_the_last_reader(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().relu_() + 1


def on_what_only_tells_its_size(x: Tensor) -> Tensor:
    y = x.contiguous()
    y.relu_()
    return y.view(x.size(0), -1) + x.shape[1]


def on_a_view(x: Tensor) -> Tensor:
    x = x * 2
    x.flatten().relu_()
    return x


def on_a_copy(x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return x.contiguous().relu_() + x


def on_a_copy_of_another_dtype(x: Tensor) -> Tensor:
    return x.to(torch.float32).relu_() + x


def on_the_input(x: Tensor) -> Tensor:
    return functional.leaky_relu_(functional.elu_(x)) * 2


@pytest.mark.parametrize("function", [on_an_alias, on_the_last_reader, on_what_only_tells_its_size, on_the_input])
def test_without_writes_the_graph_computes_the_same(function: Callable[[Tensor], Tensor]) -> None:
    graph, x = fx.symbolic_trace(function), torch.randn(3, 4).double()
    read_results_of_writes(graph)
    make_out_of_place(graph)
    graph.recompile()
    torch.testing.assert_close(graph(x.clone()), function(x.clone()), rtol=0, atol=0)


@pytest.mark.parametrize("function", [on_a_view, on_a_copy, on_a_copy_of_another_dtype])
def test_changes_of_what_may_be_a_view_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UntraceableError, match=r"relu_ changes .* in place, which may be a view of .*, read later"):
        read_results_of_writes(fx.symbolic_trace(function))
