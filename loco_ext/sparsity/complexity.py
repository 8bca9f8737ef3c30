"""Ring penalties in proportion to what each layer costs: the draft's eq. 34, block by block."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from loco_ext.sparsity.penalties import RingPenalty
from loco_ext.sparsity.tracing import convolution_of, traced

_ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
_CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)


def complexity_penalties(
    model: nn.Module, example_inputs: tuple[Tensor, ...], strength: float, **settings: Any
) -> dict[str, RingPenalty]:
    """A squared ring penalty for each Conv module, as strong as its kernels are expensive where the model stands.

    Eq. 34 relaxes the number of multiply-adds (eq. 10) to ``strength * sum_ij r_i c_i d'_(i-1) s'_ij^2``. With the
    other layers held fixed it is a ring penalty of power 2 (eq. 33) with the strength ``strength * r_i c_i d'_(i-1)``.
    ``r_i c_i`` are the pixels of the layer's output (summed over calls), ``d'_(i-1)`` is the relaxed width of its input
    (eq. 12), the sum of the Euclidean norms of the kernels that make its channels; divided by the layer's groups.
    A channel to which residual connections add several kernels counts with the norm of all of them; one that no
    convolution makes, such as the image's, counts 1.

    Widths change while the model trains: call it again from time to time, and give each group its new penalties, as
    the example does.

    Args:
        model: one that torch.fx can trace. It is run once in evaluation mode; nothing of it changes.
        example_inputs: the arguments of one call of the model; the number of samples does not matter.
        strength: finite and at least 0.
        settings: further arguments of :class:`RingPenalty`, all but ``power``.

    Returns:
        Module names to penalties, as :func:`loco_ext.optim.parameter_groups` takes them.

    Raises:
        TypeError, ValueError: naming the argument; also if torch.fx cannot trace the model.

    Source:
        The draft "Optimal Convolutional Architectures Via Structured Sparsity Regularizers", section 3.5.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from loco_ext import optim, sparsity
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3))
        >>> def make_groups():
        ...     penalties = sparsity.complexity_penalties(model, (torch.zeros(1, 3, 16, 16),), strength=1e-9)
        ...     return optim.parameter_groups(model, 5e-4, penalty=penalties)
        >>> optimizer = optim.SGD(make_groups(), lr=0.1)
        >>> round(optimizer.param_groups[0]["penalty"][0].strength / 1e-9)  # 12 x 12 pixels, 3 channels
        432
        >>> optimizer.param_groups[0]["penalty"] = make_groups()[0]["penalty"]
    """
    RingPenalty(strength, power=2, **settings)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        costs = _Costs(traced(model))
        with torch.no_grad():
            costs.run(*example_inputs)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return {name: RingPenalty(strength * cost, power=2, **settings) for name, cost in costs.of_layer.items()}


class _Costs(fx.Interpreter):
    """Runs a model and finds what a layer's ``s'_ij^2`` cost: pixels of its output times width of its input."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.of_layer: dict[str, float] = {}
        # Of tensors (N, C, ...): the squared norm of what makes each channel, float64 (C,).
        self.squares: dict[fx.Node, Tensor] = {}

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if isinstance(value, Tensor) and value.dim() > 1:
            self.squares[node] = self._squares(node, value)
        return value

    def _squares(self, node: fx.Node, value: Tensor) -> Tensor:
        sources = [self.squares[source] for source in node.all_input_nodes if source in self.squares]
        if (module := convolution_of(self.module, node)) is not None:
            name, width = str(node.target), sources[0].sqrt().sum().item() / module.groups
            self.of_layer[name] = self.of_layer.get(name, 0.0) + value.shape[2:].numel() * width
            return module.weight.double().flatten(1).square().sum(1)
        if node.target in _CONCATENATIONS:
            sources = [torch.cat(sources)]
        fitting = [source for source in sources if len(source) == value.shape[1]]
        if not fitting:
            return torch.ones(value.shape[1], dtype=torch.float64, device=value.device)
        return torch.stack(fitting).sum(0) if node.target in _ADDITIONS else fitting[0]
