"""Optimizer steps inside backward, so that the full gradient of a locally connected layer's blocks never exists."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, nn

from loco_ext.argument_checks import check_module
from loco_ext.nn.locally_connected import LocallyConnectedNd
from loco_ext.optim.base import LocalityOptimizer, as_hyper
from loco_ext.optim.options import Group, uses_torch
from loco_ext.optim.plan import Batch, StepPlan
from loco_ext.optim.states import add_states


class StepsInBackward:
    """Handle of :func:`step_in_backward`, which stays in effect until ``remove()`` is called."""

    def __init__(self, optimizer: LocalityOptimizer, layers: list[LocallyConnectedNd]) -> None:
        self._optimizer, self._layers = optimizer, layers
        for layer in layers:
            layer._backward_step = _BackwardStep(optimizer, layer.weight)
        optimizer._stepped_in_backward += tuple(layer.weight for layer in layers)
        optimizer._refresh()

    def remove(self) -> None:
        """Stop stepping in backward: the layers have gradients again, and ``optimizer.step()`` steps them."""
        ended = {id(layer._backward_step.weight) for layer in self._layers}
        for layer in self._layers:
            layer._backward_step = None
        self._layers = []
        stepped = self._optimizer._stepped_in_backward
        self._optimizer._stepped_in_backward = tuple(weight for weight in stepped if id(weight) not in ended)
        self._optimizer._refresh()


def step_in_backward(optimizer: LocalityOptimizer, model: nn.Module) -> StepsInBackward:
    """Make ``backward()`` itself step the blocks of the model's locally connected layers from now on.

    As soon as backward has passed a layer, it steps the layer's ``weight`` part by part: it computes the gradient of a
    part, uses it and frees it. ``weight.grad`` stays None. This saves the memory of these gradients, which is as much
    as that of the weights; fully grown layers hold most of a model's weights. The results are those of
    ``optimizer.step()``, bit for bit, with the group's current options, decay maps and states. ``optimizer.step()``
    steps everything else as before.

    Every ``backward()`` that reaches the weights is then a step. Gradients cannot be accumulated over several calls,
    clipped, scaled or passed to hooks of ``weight``. The loss must depend on ``weight`` only through its layer. A
    forward must use the layer once, in at most one reentrant checkpoint. A side stream must have ended before
    ``weight`` is used again.

    Args:
        optimizer: an SGD, Adam or AdamW of this package that has the ``weight`` of these layers, in groups without
            ``penalty``, ``stochastic_rounding``, ``foreach`` and ``differentiable``.
        model: a module with locally connected layers. Its deep copies have ordinary gradients.

    Returns:
        A handle whose ``remove()`` ends stepping in backward.

    Raises:
        TypeError: ``optimizer`` is of another class; ``model`` is not a module; a ``weight`` is not an ordinary
            parameter, for example if it is sharded.
        ValueError: the model has no such layer; the optimizer lacks a layer's ``weight``; a layer already steps in
            backward, or its ``weight`` has a gradient; a group has one of the options excluded above.
        RuntimeError: in backward with ``create_graph``, in several processes (nothing would average the gradients), at
            a layer's second use, or if a state has another size than its weight. In ``optimizer.step()`` with a
            GradScaler, or if a ``weight`` has a gradient by another path, because backward has already stepped it. In a
            forward that torch.compile traces as a whole.

    Example:
        >>> import torch
        >>> from loco_ext import nn, optim
        >>> layer = nn.LocallyConnected2d(3, 8, 3, padding=1, input_size=6).grow(6)
        >>> optimizer = optim.SGD(layer.parameters(), lr=0.1)
        >>> steps = optim.step_in_backward(optimizer, layer)
        >>> before = layer.weight.clone()
        >>> layer(torch.randn(2, 3, 6, 6)).square().mean().backward()
        >>> layer.weight.grad is None, torch.equal(layer.weight, before)
        (True, False)
        >>> optimizer.step()  # the bias
    """
    if not isinstance(optimizer, LocalityOptimizer):
        raise TypeError(f"optimizer: expected an SGD, Adam or AdamW of loco_ext, got {type(optimizer).__name__}")
    check_module("model", model)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LocallyConnectedNd)}
    if not layers:
        raise ValueError("model: expected a module with locally connected layers, found none")
    for name, layer in layers.items():
        if type(layer.weight) is not nn.Parameter:
            raise TypeError(f"{name}.weight: expected an ordinary parameter, got {type(layer.weight).__name__}")
        if layer._backward_step is not None:
            raise ValueError(f"{name}: expected a layer whose steps are not in backward already")
        if layer.weight.grad is not None:
            raise ValueError(f"{name}.weight: expected no gradient yet, as it would stay; set it to None")
        index, _, _ = _place(optimizer, layer.weight)
        _check_group(optimizer.param_groups[index])
    return StepsInBackward(optimizer, list(layers.values()))


@contextmanager
def ordinary_gradients(model: nn.Module) -> Iterator[None]:
    """Let no backward inside of the ``with`` step the model's layers: their weights have gradients as all others."""
    layers = [m for m in model.modules() if isinstance(m, LocallyConnectedNd) and m._backward_step is not None]
    steps = [layer._backward_step for layer in layers]
    try:
        for layer in layers:
            layer._backward_step = None
        yield
    finally:
        for layer, step in zip(layers, steps, strict=True):
            layer._backward_step = step


class _BackwardStep:
    """Steps one layer's weight by the gradient that backward computes; see :data:`loco_ext.ops.Consume`."""

    def __init__(self, optimizer: LocalityOptimizer, weight: nn.Parameter) -> None:
        self._optimizer, self.weight = optimizer, weight
        self._last_pass = -1

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # a copied or loaded layer has ordinary gradients

    def of(self, weight: Tensor) -> "_BackwardStep | None":
        """Return self if this is the weight that it steps, None if another has taken its place."""
        return self if weight is self.weight else None

    @torch.no_grad()
    def __call__(self, parts: Iterator[tuple[slice, Tensor]]) -> None:
        optimizer, weight = self._optimizer, self.weight
        # Only autograd's engine knows whether this pass, identified by its task id, will give weight a gradient.
        if not torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(weight).node):
            return
        number = torch._C._current_graph_task_id()
        if number == self._last_pass:
            raise RuntimeError("step_in_backward: expected a layer that is used once in a forward, got a second use")
        if _processes() > 1:
            raise RuntimeError("step_in_backward: expected one process, as no gradients are averaged, got several")
        place = _place(optimizer, weight)
        _check_group(optimizer.param_groups[place[0]])
        whole = _whole(optimizer, *place)
        self._last_pass = number
        _step(optimizer, whole, parts)


def _step(optimizer: LocalityOptimizer, whole: Batch, parts: Iterator[tuple[slice, Tensor]]) -> None:
    whole.check_capture()
    counted = whole.steps
    for blocks, gradient in parts:
        part = _part(whole, blocks, gradient)
        part.launch()
        counted = part.steps
        del part, gradient  # frees them before the next part's are computed
    for count, new in zip(whole.steps, counted, strict=True):
        count.copy_(new)
    optimizer._keep_created(whole)
    torch.autograd.graph.increment_version(whole.params)


def _processes() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _place(optimizer: LocalityOptimizer, weight: Tensor) -> tuple[int, StepPlan, int]:
    """Return the index of the group that has a parameter, its plan and the parameter's index there."""
    for index, plan in enumerate(optimizer._current_plans()):
        for place, param in enumerate(plan.params):
            if param is weight:
                return index, plan, place
    raise ValueError("optimizer: expected one that has the weights of all locally connected layers of the model")


def _check_group(group: Group) -> None:
    if uses_torch(group):
        raise ValueError("foreach, differentiable: expected None or False for steps in backward")
    for name in ("penalty", "stochastic_rounding"):
        if group[name] is not None:
            raise ValueError(f"{name}: expected None for steps in backward, got {group[name]!r}")


def _whole(optimizer: LocalityOptimizer, index: int, plan: StepPlan, place: int) -> Batch:
    """Return the operator's arguments for all blocks, except the gradient; see :func:`_place`."""
    group = optimizer.param_groups[index]
    weight, decay_map = plan.params[place], plan.map_of(place)
    batch = optimizer._batch(group, str(weight.device), {})
    batch.params, batch.groups = [weight], [index]
    batch.maps, batch.map_index = ([], []) if decay_map is None else ([decay_map], [0])
    batch.hyper = as_hyper(optimizer._rows(batch))
    add_states(batch, group, [weight], optimizer.state)
    for state in chain.from_iterable(batch.states):
        if state.shape != weight.shape:
            raise RuntimeError(
                f"optimizer: expected one that was given to grow and prune, got a state of shape {tuple(state.shape)} "
                f"for a weight of shape {tuple(weight.shape)}"
            )
    return batch


def _part(whole: Batch, blocks: slice, gradient: Tensor) -> Batch:
    """Return the operator's arguments for a slice of the blocks."""
    count = len(whole.params[0])
    return replace(
        whole,
        params=[whole.params[0][blocks]],
        grads=[gradient],
        states=[[state[blocks] for state in states] for states in whole.states],
        steps=[step.clone() for step in whole.steps],  # each operator call increments the count of its own part
        maps=[each[blocks] if len(each) == count else each for each in whole.maps],
    )
