"""Graphs of models: those of Sequentials, which are built without tracing, are the ones that torch.fx traces."""

import pytest
import torch
from torch import fx, nn

from loco_ext.fx.trace import UntraceableError, trace


class Traced(nn.Module):
    """A module with code of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() + 1


def calls(graph: fx.Graph) -> list[tuple[str, object, list[str]]]:
    """Return the operation, target and inputs of each node of a graph."""
    return [(node.op, node.target, [source.name for source in node.all_input_nodes]) for node in graph.nodes]


def assert_as_traced(model: nn.Module, x: torch.Tensor) -> None:
    found, expected = trace(model), fx.symbolic_trace(model)
    assert calls(found.graph) == calls(expected.graph)
    assert [node.name for node in found.graph.nodes] == [node.name for node in expected.graph.nodes]
    torch.testing.assert_close(found(x), model(x), rtol=0, atol=0)


def test_the_graph_of_a_sequential_is_that_of_torch_fx():
    again = nn.Linear(4, 4)
    nested = nn.Sequential(nn.Sequential(again, nn.ReLU()), again, nn.Sequential(), nn.Sequential(nn.Tanh()))
    named = nn.Sequential()
    named.add_module("first", nn.Linear(4, 3))
    named.add_module("last", nn.Sigmoid())
    for model in (nested, named, nn.Sequential()):
        assert_as_traced(model, torch.randn(2, 4))


def test_what_a_sequential_does_beside_calling_its_modules_is_traced():
    hooked = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.ReLU())
    hooked[0].register_forward_hook(lambda module, inputs, output: output * 3)

    class Twice(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    inner = nn.Sequential(nn.Linear(4, 4))
    inner.forward = lambda input: nn.Sequential.forward(inner, input) + 5
    of_code = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Traced()), nn.ReLU())
    for model in (of_code, hooked, Twice(nn.ReLU()), nn.Sequential(Twice(nn.Linear(4, 4))), nn.Sequential(inner)):
        assert_as_traced(model, torch.randn(2, 4))


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(4, 4)), Traced])
def test_a_forward_that_torch_fx_would_not_trace_is_refused(make):
    model = make()
    model.forward = lambda x: type(model).forward(model, 2 * x)
    with pytest.raises(UntraceableError, match=r"model: expected the forward of its class"):
        trace(model)


def test_a_model_that_is_to_stay_one_call_is_the_only_one():
    model, x = Traced(), torch.randn(2, 4)
    graph = trace(model, lambda module: isinstance(module, Traced))
    called = [(node.op, node.target) for node in graph.graph.nodes if node.op != "placeholder"]
    assert called == [("call_module", "the model"), ("output", "output")]
    assert graph.get_submodule("the model") is model
    assert torch.equal(graph(x), model(x))


def test_hooks_of_all_modules_are_traced():
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 2)
    try:
        model = nn.Sequential(nn.Linear(4, 4))
        assert calls(trace(model).graph) == calls(fx.symbolic_trace(model).graph)
    finally:
        handle.remove()


def test_a_refusal_names_the_module_that_cannot_be_traced():
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.shape[-1] % 2 else x[..., 1:]

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Traced(), Branching()))
    with pytest.raises(UntraceableError, match=r"got TraceError in Sequential, in its 1\.1 \(Branching\): symb"):
        trace(model)
    with pytest.raises(UntraceableError, match=r"got TraceError in Branching: symbolically"):
        trace(Branching())
