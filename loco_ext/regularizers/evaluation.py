"""The state that a model is measured in, and what is checked of the model and its inputs before."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from loco_ext.argument_checks import check_module, check_tensor
from loco_ext.nn.modes import evaluating

_ONE_THREAD_MEASURES = threading.RLock()


@contextmanager
def measuring(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Switch the model to evaluation mode, autocast off, gradients on, and restore all of it with the RNG on exit.

    Compiled parts of the model run eagerly, and attention and hard sigmoids by other operations of torch, because only
    these can be differentiated twice. Hooks of parameters do not run: they are for the gradient of the training loss.
    What is switched belongs to the model or to the process, so that another thread waits until this one has measured.
    """
    with _ONE_THREAD_MEASURES, evaluating(model):
        hooks = [(p, p._backward_hooks) for p in model.parameters() if p._backward_hooks]
        try:
            for parameter, _ in hooks:
                parameter._backward_hooks = None
            with (
                torch.random.fork_rng([device] if device.type == "cuda" else []),
                torch.autocast(device.type, enabled=False),
                torch.inference_mode(False),
                torch.enable_grad(),
                sdpa_kernel(SDPBackend.MATH),
                torch.compiler.set_stance("force_eager"),
                _HardSigmoidsInParts(),
            ):
                yield
        finally:
            for parameter, own in hooks:
                parameter._backward_hooks = own


class _HardSigmoidsInParts(TorchFunctionMode):
    """Compute hard sigmoids by operations whose backward passes torch can differentiate."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return (_hardsigmoid if func is F.hardsigmoid else func)(*args, **kwargs or {})


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    result = F.relu6(input + 3) / 6
    return input.copy_(result) if inplace else result


def constant(x: Tensor) -> Tensor:
    """Return the tensor without its gradient, or a copy if it is one of inference mode that autograd cannot save."""
    return x.clone() if x.is_inference() else x.detach()


def check_images(name: str, x: Any) -> None:
    """Raise TypeError or ValueError unless x is a batch of images, ``(N, C, H, W)``, floating-point and not empty."""
    check_tensor(name, x, floating=True)
    if x.dim() != 4 or x.numel() == 0:
        raise ValueError(f"{name}: expected images of shape (N, C, H, W), at least one, got {tuple(x.shape)}")


def check_logits(logits: Any, x: Tensor) -> None:
    """Raise TypeError or ValueError unless the model's output for the images x is ``(batch, classes)``."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"model: expected an output tensor of shape (batch, classes), got {type(logits).__name__}")
    if logits.dim() != 2 or len(logits) != len(x) or logits.shape[1] == 0:
        raise ValueError(f"model: expected an output of shape ({len(x)}, classes), got {tuple(logits.shape)}")


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require a gradient.

    Raises:
        TypeError: ``model`` is not a module, or one of these is sharded: it is not the tensor that the model computes
            with, or its gradient is in parts.
        ValueError: there are none.
    """
    check_module("model", model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError("model: expected parameters that require gradients, got none")
    for parameter in parameters:
        if type(parameter.data) is not Tensor:
            raise TypeError(f"model: expected parameters that are whole, got {type(parameter.data).__name__}")
    return parameters
