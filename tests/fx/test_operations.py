"""Names of operations are the same for layers, functions and methods, and every name in a table is one of torch's."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from loco_ext import ops
from loco_ext.fx import operations
from loco_ext.fx.operations import operation


class Relu(nn.ReLU):
    pass


def names(*calls):
    """Return the operations of nodes that call these modules, functions and methods (given by name)."""
    root, graph = nn.Module(), fx.Graph()
    x = graph.placeholder("x")
    for i, call in enumerate(calls):
        if isinstance(call, nn.Module):
            root.add_module(f"layer{i}", call)
            graph.call_module(f"layer{i}", (x,))
        elif isinstance(call, str):
            graph.call_method(call, (x,))
        else:
            graph.call_function(call, (x, x))
    return [operation(node) for node in fx.GraphModule(root, graph).graph.nodes][1:]


def test_layers_functions_and_methods_have_one_name():
    assert set(names(nn.ReLU(), nn.ReLU(inplace=True), torch.relu, torch.relu_, F.relu, "relu", "relu_")) == {"relu"}
    assert set(names(operator.add, operator.iadd, torch.add, "add", "add_")) == {"add"}
    assert set(names(operator.truediv, operator.itruediv, torch.div, "div_")) == {"div"}
    assert set(names(torch.cat, torch.concat, torch.concatenate)) == {"cat"}
    assert set(names(nn.MaxPool2d(2), F.max_pool2d)) == {"maxpool2d"} <= operations.POOLS.keys()
    assert names(Relu(), lambda x, y: x, ops.mixed_conv2d) == ["", "", "mixedconv2d"]


@pytest.mark.parametrize("table", ["POINTWISE", "KEEPING_SHAPE", "RETURNING_NEW", "POOLS", "ADAPTIVE_POOLS"])
def test_every_name_is_one_of_torchs(table):
    libraries = (nn, F, torch, torch.Tensor, operator, ops.mixed_conv, ops.channels)
    known = {operations._plain(name) for library in libraries for name in dir(library)}
    assert set(getattr(operations, table)) <= known
