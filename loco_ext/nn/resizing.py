"""Changes of the number of a weight's blocks during training, together with its optimizer states."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from loco_ext.geometry import BlockPattern


@torch.no_grad()
def resize(weight: nn.Parameter, move: Callable[[Tensor], Tensor], optimizer: Optimizer | None) -> None:
    """Replace the blocks of ``weight``, and of each optimizer state of its size, by what ``move`` returns for them.

    The parameter stays the same object, so that references to it, such as those of optimizers and schedulers, remain
    valid. Its gradient is cleared; a later backward through the old blocks is an error.

    Raises:
        TypeError: ``weight`` is not an ordinary parameter; ``optimizer`` is not an optimizer, or has a state of another
            size.
        ValueError: the optimizer does not step ``weight``.
    """
    if type(weight) is not nn.Parameter:
        raise TypeError(f"weight: expected an ordinary parameter, got {type(weight).__name__}")
    if weight.is_inference():
        raise TypeError("weight: expected a parameter that can be trained, got one made in torch.inference_mode")
    moved = {name: move(tensor) for name, tensor in _block_states(weight, optimizer).items()}
    replace(weight, move(weight.detach()))
    if optimizer is not None and moved:
        optimizer.state[weight].update(moved)


def replace(weight: nn.Parameter, new: Tensor) -> None:
    """Replace the parameter's blocks by any number of others.

    Optimizers with states of the old size then fail in their next step. A hook checks this, since torch's own
    optimizers with ``fused=True`` do not check the sizes of states and would read and write out of bounds.
    """
    _watch_steps()
    if new.shape != weight.shape:
        weight.former_shapes = (*getattr(weight, "former_shapes", ()), weight.shape)  # type: ignore[attr-defined]
    weight.grad = None
    # Graphs that are still alive hold the AccumulateGrad node, which has the old shape. A change of the dtype makes the
    # parameter drop it.
    weight.data = new.new_empty(0, dtype=torch.float32 if new.dtype == torch.float64 else torch.float64)
    weight.data = new
    torch.autograd.graph.increment_version(weight)


@cache
def _watch_steps() -> None:
    """Register the check of optimizer states, once, at the first resize; before that, steps cost nothing more."""
    register_optimizer_step_pre_hook(_check_states)


def _check_states(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if torch.compiler.is_compiling():
        return
    for weight in [param for group in optimizer.param_groups for param in group["params"]]:
        if (former := getattr(weight, "former_shapes", None)) is None:
            continue
        for name, state in optimizer.state.get(weight, {}).items():
            if isinstance(state, Tensor) and state.shape != weight.shape and state.shape in former:
                raise RuntimeError(
                    f"optimizer: expected one that was given to grow and prune, got {name} of shape "
                    f"{tuple(state.shape)} for weight of shape {tuple(weight.shape)}"
                )


def loaded_pattern(
    present: BlockPattern, shape: torch.Size, crow: Tensor | None, col: Tensor | None, weight: Tensor | None
) -> BlockPattern:
    """Return the pattern of a state dict for the same convolution; ``present`` itself if equal or absent.

    ``shape`` is the shape of one block.

    Raises:
        TypeError, ValueError: the indices form no pattern between these pixels, or ``weight`` does not match them.
    """
    if crow is None or col is None:
        return present
    home = present.to("cpu")
    if isinstance(crow, Tensor) and crow.shape != home.crow_indices.shape:
        raise ValueError(f"crow_indices: expected {home.n_out + 1}, as in the layer, got shape {tuple(crow.shape)}")
    loaded = BlockPattern(crow, col, home.n_in, home.conv)
    if weight is None or weight.shape != (loaded.nnz, *shape):
        got = "none" if weight is None else f"shape {tuple(weight.shape)}"
        raise ValueError(
            f"weight: expected {loaded.nnz} blocks, as the indices say, of shape {tuple(shape)}, got {got}"
        )
    same = torch.equal(loaded.crow_indices, home.crow_indices) and torch.equal(loaded.col_indices, home.col_indices)
    return present if same else loaded


def _block_states(weight: nn.Parameter, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Return the states with one element for each of the parameter's; others are scalars, such as a count of steps."""
    if optimizer is None:
        return {}
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer: expected None or a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if not any(weight is param for group in optimizer.param_groups for param in group["params"]):
        raise ValueError("optimizer: expected the one that steps this layer's weight, which are not among its groups")
    states = optimizer.state.get(weight, {})
    tensors = {name: state for name, state in states.items() if isinstance(state, Tensor) and state.dim() > 0}
    for name, state in tensors.items():
        if state.shape != weight.shape:
            raise TypeError(
                f"optimizer: expected states of the shape of weight, {tuple(weight.shape)}, or single numbers, got "
                f"{name} of shape {tuple(state.shape)}"
            )
    return tensors
