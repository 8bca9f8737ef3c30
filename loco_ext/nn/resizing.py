"""Changes of the number of a parameter's blocks during training, together with its optimizer states."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from loco_ext.geometry import BlockPattern


@torch.no_grad()
def resize(values: nn.Parameter, move: Callable[[Tensor], Tensor], optimizer: Optimizer | None) -> None:
    """Replace the blocks of ``values``, and of each optimizer state of its size, by what ``move`` returns for them.

    The parameter stays the same object, so that references to it, such as those of optimizers and schedulers, remain
    valid. Its gradient is cleared; a later backward through the old blocks is an error.

    Raises:
        TypeError: ``values`` is not an ordinary parameter; ``optimizer`` is not an optimizer, or has a state of another
            size.
        ValueError: the optimizer does not step ``values``.
    """
    if type(values) is not nn.Parameter:
        raise TypeError(f"values: expected an ordinary parameter, got {type(values).__name__}")
    moved = {name: move(tensor) for name, tensor in _block_states(values, optimizer).items()}
    replace(values, move(values.detach()))
    if optimizer is not None and moved:
        optimizer.state[values].update(moved)


def replace(values: nn.Parameter, new: Tensor) -> None:
    """Replace the parameter's blocks by any number of others.

    Optimizers with states of the old size then fail in their next step. A hook checks this, since torch's own
    optimizers with ``fused=True`` do not check the sizes of states and would read and write out of bounds.
    """
    _watch_steps()
    if new.shape != values.shape:
        values.former_shapes = (*getattr(values, "former_shapes", ()), values.shape)  # type: ignore[attr-defined]
    values.grad = None
    # Graphs that are still alive hold the AccumulateGrad node, which has the old shape. A change of the dtype makes the
    # parameter drop it.
    values.data = new.new_empty(0, dtype=torch.float32 if new.dtype == torch.float64 else torch.float64)
    values.data = new
    torch.autograd.graph.increment_version(values)


@cache
def _watch_steps() -> None:
    """Register the check of optimizer states, once, at the first resize; before that, steps cost nothing more."""
    register_optimizer_step_pre_hook(_check_states)


def _check_states(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if torch.compiler.is_compiling():
        return
    for values in [param for group in optimizer.param_groups for param in group["params"]]:
        if (former := getattr(values, "former_shapes", None)) is None:
            continue
        for name, state in optimizer.state.get(values, {}).items():
            if isinstance(state, Tensor) and state.shape != values.shape and state.shape in former:
                raise RuntimeError(
                    f"optimizer: expected one that was given to grow and prune, got {name} of shape "
                    f"{tuple(state.shape)} for values of shape {tuple(values.shape)}"
                )


def loaded_pattern(
    present: BlockPattern, shape: torch.Size, crow: Tensor | None, col: Tensor | None, values: Tensor | None
) -> BlockPattern:
    """Return the pattern of a state dict for the same convolution; ``present`` itself if equal or absent.

    ``shape`` is the shape of one block.

    Raises:
        TypeError, ValueError: the indices form no pattern between these pixels, or ``values`` does not match them.
    """
    if crow is None or col is None:
        return present
    home = present.to("cpu")
    if isinstance(crow, Tensor) and crow.shape != home.crow_indices.shape:
        raise ValueError(f"crow_indices: expected {home.n_out + 1}, as in the layer, got shape {tuple(crow.shape)}")
    loaded = BlockPattern(crow, col, home.n_in, home.conv)
    if values is None or values.shape != (loaded.nnz, *shape):
        got = "none" if values is None else f"shape {tuple(values.shape)}"
        raise ValueError(
            f"values: expected {loaded.nnz} blocks, as the indices say, of shape {tuple(shape)}, got {got}"
        )
    same = torch.equal(loaded.crow_indices, home.crow_indices) and torch.equal(loaded.col_indices, home.col_indices)
    return present if same else loaded


def _block_states(values: nn.Parameter, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Return the states with one element for each of the parameter's; others are scalars, such as a count of steps."""
    if optimizer is None:
        return {}
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer: expected None or a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if not any(values is param for group in optimizer.param_groups for param in group["params"]):
        raise ValueError("optimizer: expected the one that steps this layer's values, which are not among its groups")
    states = optimizer.state.get(values, {})
    tensors = {name: state for name, state in states.items() if isinstance(state, Tensor) and state.dim() > 0}
    for name, state in tensors.items():
        if state.shape != values.shape:
            raise TypeError(
                f"optimizer: expected states of the shape of values, {tuple(values.shape)}, or single numbers, got "
                f"{name} of shape {tuple(state.shape)}"
            )
    return tensors
