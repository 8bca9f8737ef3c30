"""Branches of a model's code on sizes: tracing takes those of an example, and the graph refuses inputs that differ."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import handle_torch_function, has_torch_function_unary

Number = TypeVar("Number", bool, int, float)


class BranchError(ValueError):
    """Inputs for which a model's code takes another branch than for the example with which it was traced."""


@fx.has_side_effect
def same_as_on_example(value: Any, example: Number, where: str) -> Number:
    """Return the number that code of a model reads, if it is the same as for the example with which it was traced.

    Args:
        value: what is read; a bool, an int or a float is made of it, as of ``example``.
        example: the number for the example.
        where: the name of the module whose code reads it.

    Raises:
        BranchError: the number differs.
    """
    if has_torch_function_unary(value):  # it is traced
        return handle_torch_function(same_as_on_example, (value,), value, example, where)
    found = type(example)(value)
    # torch.compile cannot compare two bools if sizes vary.
    differs = (not value if example else value) if isinstance(example, bool) else found != example
    if differs:
        raise BranchError(
            f"inputs: expected sizes for which what the code of {where} reads is {example}, as for the example with "
            f"which it was traced, got {found}"
        )
    return found


def length(values: Any) -> int:
    """Return the length of a tuple or list; unlike Python's ``len`` it can be traced."""
    if has_torch_function_unary(values):
        return handle_torch_function(length, (values,), values)
    return len(values)


class ValuesOnExample:
    """The values of nodes of a graph for an example; of tensors only their shape, dtype and device are known.

    Numbers in a tensor are not known, so that what depends on them has no value.

    Args:
        root: the model that is traced.
        graph: its graph, which may grow.
        inputs: the arguments of the example.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph, inputs: Sequence[Any]) -> None:
        self._root, self._graph, self._inputs = root, graph, inputs
        self.running = False

    def of(self, node: fx.Node) -> Any:
        """Return the value of a node; what cannot be computed raises whatever its operations do."""
        values, open_nodes = self._interpreter.env, [node]
        self.running = True
        try:
            with torch.no_grad(), self._fake:
                while open_nodes:
                    latest = open_nodes[-1]
                    missing = [x for x in latest.all_input_nodes if x not in values]
                    if not missing:
                        if latest not in values:
                            values[latest] = self._interpreter.run_node(latest)
                        open_nodes.pop()
                    open_nodes += missing
        finally:
            self.running = False
        return values[node]

    @cached_property
    def _fake(self) -> FakeTensorMode:
        # Without ``export``, torch 2.15 knows the number in a tensor without axes. The first mode takes seconds.
        return FakeTensorMode(allow_non_fake_inputs=True, export=True)

    @cached_property
    def _interpreter(self) -> fx.Interpreter:
        interpreter = fx.Interpreter(self._root, garbage_collect_values=False, graph=self._graph)
        interpreter.extra_traceback = False
        given = [self._fake.from_tensor(x) if isinstance(x, Tensor) else x for x in self._inputs]
        interpreter.args_iter = iter(given)
        for node in self._graph.nodes:
            if node.op == "placeholder":
                interpreter.env[node] = interpreter.run_node(node)
        return interpreter


class NumberProxy(fx.Proxy):
    """Proxy of which Python's own code may read a number, which its tracer knows."""

    tracer: Any

    def __getattr__(self, name: str) -> fx.proxy.Attribute:
        return _Attribute(self, name)

    def __int__(self) -> int:
        return int(self.tracer.number(self, int))

    def __float__(self) -> float:
        return float(self.tracer.number(self, float))

    def __len__(self) -> int:
        return int(self.tracer.length(self))

    __index__ = __int__


class _Attribute(fx.proxy.Attribute, NumberProxy):
    """Attribute of such a proxy."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute; the type of a device is the example's, as a string, which torch.autocast demands."""
        if (self.attr, name) == ("device", "type"):
            return self.tracer.value(self).type
        return super().__getattr__(name)
