"""PILCRO: a regulariser that makes a classifier look at all parts of its images.

With ``A = sum of w_m g_m^2`` over samples, the loss L depends on the parameters through the input gradients g and,
in the exact expectation, through the probabilities in the weights w. With ``u = dL/dg`` and ``c = dL/dw`` constant, its
gradient is that of ``<g, u> + <w, c>``. A landscape needs the gradients of all samples before the first u: all chunks
but the last are computed a second time.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from loco_ext import compiler, ops
from loco_ext.argument_checks import check_choice, check_count, check_number, check_seed, check_tensor
from loco_ext.fx.modules import unwrapped
from loco_ext.ops.landscape import check_stencil, check_target
from loco_ext.reference.dtypes import compute_dtype
from loco_ext.regularizers.evaluation import check_images, check_logits, constant, measuring, trained_parameters
from loco_ext.regularizers.input_gradients import EXPECTATIONS
from loco_ext.regularizers.landscape import make_stencil
from loco_ext.regularizers.routes import Gradients, Route, double_backward
from loco_ext.regularizers.tangent import TangentRoute

MODES = ("curvature", "target")
ALPHA_SCALINGS = ("none", "T")
REDUCTIONS = ("sum", "mean")
ROUTES = ("tangent", "double_backward")


class PILCRO:
    """Loss on a classifier's importance landscape, to be added to the training loss.

    Every ``every``-th call, from the first on, computes the loss and its exact gradient with respect to the parameters,
    without differentiating a backward pass. The other calls return zero and cost nothing.

    The model runs in evaluation mode without autocast. Batch normalisations thus use their running statistics, and a
    batch of one image is as good as any. The model's flags, its running statistics and the RNG are left as they were,
    also when an exception is raised. Buffers that a model's own code changes in evaluation mode are changed by these
    passes too. The loss is computed outside of graphs of torch.compile, so do not call it inside a function that is
    compiled with ``fullgraph=True``.

    Under DistributedDataParallel each process regularises the landscape of its own batch. Add the loss to the training
    loss, so that one backward pass synchronises both. With gradient accumulation, call it once for each optimizer step.
    Call it before the forward pass, so that both do not need memory at once.

    Args:
        mode: ``"curvature"`` for the variance of the landscape's Laplacian, ``"target"`` for the squared distance of
            the landscape to ``target``.
        alpha: factor of the loss; the paper has 1, 10 and 100 for ``every=10``. The curvature loss is far steeper than
            the target loss with a mean, because the centre of the Laplacian is -8; 0.1 is a usual value there.
        every: number of calls from one application to the next, T.
        target: ``(H, W)``: the map to attain, such as :func:`data_smoothness`; only for mode ``"target"``.
        laplacian_kernel: odd width of the Laplacian, or a stencil, ``(k, k)``; only for mode ``"curvature"``.
        alpha_scaling: ``"none"``, or ``"T"`` to multiply the loss by ``every``.
        reduction: only for mode ``"target"``, because the curvature loss is a mean: ``"sum"`` over the pixels, as eq. 9
            is printed, or ``"mean"``. None is ``"sum"``. The mean does not grow with the images; usual values of alpha
            for it are 1 to 100.
        expectation: as for :func:`importance_landscape`; ``"exact"`` takes as many passes as there are classes.
        chunk_size: maximum number of images to compute at once, to limit memory; None for the whole batch. The gradient
            is that of the whole batch in either case, unless the model has batch norms without running statistics,
            which use those of the images that are computed at once.
        route: how the gradient is computed: ``"tangent"``, or ``"double_backward"``, which is slower.
        seed: seed of the classes that are drawn.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value. In a call, as for :func:`importance_landscape`, or
            if the target has another size or no parameter requires a gradient.
        RuntimeError: in a call, as for :func:`importance_landscape`.

    Source:
        "PILCRO: Making Importance Landscapes Flat Again", section 3.3.

    Example:
        >>> import torch
        >>> from loco_ext import regularizers
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 6 * 6, 10))
        >>> x, y = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
        >>> pilcro = regularizers.PILCRO("target", alpha=10, target=regularizers.data_smoothness(x))
        >>> loss = pilcro(model, x) + torch.nn.functional.cross_entropy(model(x), y)
        >>> loss.backward()
    """

    def __init__(
        self,
        mode: str = "curvature",
        alpha: float = 1.0,
        every: int = 10,
        *,
        target: Tensor | None = None,
        laplacian_kernel: int | Tensor = 3,
        alpha_scaling: str = "none",
        reduction: str | None = None,
        expectation: str = "sampled",
        chunk_size: int | None = None,
        route: str = "tangent",
        seed: int = 0,
    ) -> None:
        check_choice("mode", mode, MODES)
        check_choice("alpha_scaling", alpha_scaling, ALPHA_SCALINGS)
        if reduction is not None:
            check_choice("reduction", reduction, REDUCTIONS)
        check_choice("expectation", expectation, EXPECTATIONS)
        check_choice("route", route, ROUTES)
        if mode == "target" and target is None:
            raise TypeError("target: expected a map of shape (H, W) for mode 'target', got None")
        if mode != "target" and target is not None:
            raise ValueError(f"target: expected None for mode {mode!r}, got a map")
        if mode != "target" and reduction is not None:
            raise ValueError(f"reduction: expected None for mode {mode!r}, whose loss is a mean, got {reduction!r}")
        if target is not None:
            check_tensor("target", target)
        self.mode = mode
        self.alpha = check_number("alpha", alpha)
        self.every = check_count("every", every, smallest=1)
        self.target = target
        self.alpha_scaling = alpha_scaling
        self.reduction = reduction
        self.expectation = expectation
        self.chunk_size = None if chunk_size is None else check_count("chunk_size", chunk_size, smallest=1)
        self.route = route
        self.seed = check_seed(seed)
        stencil = make_stencil(laplacian_kernel)
        self._stencil = stencil if mode == "curvature" else make_stencil(1)  # the target loss uses none
        self._route: Route = TangentRoute() if route == "tangent" else double_backward
        self._calls = 0

    @compiler.disable
    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the loss of this step, a scalar; zero between applications."""
        parameters = trained_parameters(model)
        check_images("x", x)
        check_stencil("laplacian_kernel", self._stencil, x)
        if self.target is not None:
            check_target(self.target, x)
        call = self._calls
        if call % self.every or self.alpha == 0:
            self._calls += 1
            return torch.zeros((), dtype=compute_dtype(x.dtype), device=x.device, requires_grad=True)
        inner = unwrapped(model)
        with measuring(inner, x.device):
            loss, gradients = self._loss_and_gradients(inner, parameters, constant(x), self._uniform(call, x))
        self._calls += 1
        reached = [(p, gradient) for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
        # DistributedDataParallel fails if backward comes to parameters that the model has not used.
        return _Loss.apply(loss.requires_grad_(), [gradient for _, gradient in reached], *(p for p, _ in reached))

    def _loss_and_gradients(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], x: Tensor, uniform: Tensor
    ) -> tuple[Tensor, Gradients]:
        """Return the loss and its gradient in each parameter, None where it is zero; ``uniform`` draws classes."""
        restart, exact = _restart_rng(x.device), self.expectation == "exact"
        chunks, draws = (part.split(self.chunk_size or len(x)) for part in (x, uniform))
        count = 1
        if exact:
            restart()
            with torch.no_grad():
                logits = model(chunks[0].clone())  # the model may write to its input
            check_logits(logits, chunks[0])
            count = logits.shape[1]
        pieces = [
            (chunk, k if exact else None, draw) for chunk, draw in zip(chunks, draws, strict=True) for k in range(count)
        ]
        founds = []
        for piece in pieces:
            restart()
            found, pull = self._route(model, parameters, *piece)
            founds.append(found)
        g = torch.cat([found.g for found in founds]).requires_grad_()
        weights = torch.cat([f.probabilities if exact else torch.ones_like(f.probabilities) for f in founds])
        weights = (weights / len(x)).requires_grad_()
        target = None if self.target is None else self.target.to(x.device)
        loss = ops.landscape(g, weights, self._stencil.to(x.device), target).loss * self._factor(x)
        u, c = (part.split([len(found.g) for found in founds]) for part in torch.autograd.grad(loss, (g, weights)))
        total: list[Tensor | None] = [None] * len(parameters)
        _add(total, pull(u[-1]))
        del pull
        for (chunk, _k, draw), found, direction in zip(pieces[:-1], founds, u, strict=False):
            restart()
            _, pull = self._route(model, parameters, chunk, found.classes, draw)
            _add(total, pull(direction))
            del pull
        if exact:
            for i, chunk in enumerate(chunks):
                restart()
                by_class = torch.stack(c[i * count : (i + 1) * count], 1)  # [N, classes]
                probable = (model(chunk.clone()).double().softmax(1) * by_class).sum() / len(x)
                _add(total, torch.autograd.grad(probable, parameters, allow_unused=True))
        return loss.detach(), total

    def _factor(self, x: Tensor) -> float:
        """Return the factor of the loss of images ``x``."""
        pixels = x.shape[-2:].numel() if self.reduction == "mean" else 1
        return self.alpha * (self.every if self.alpha_scaling == "T" else 1) / pixels

    def _uniform(self, call: int, x: Tensor) -> Tensor:
        """Return the numbers in [0, 1) by which this call draws classes, ``(N,)``."""
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        generator = torch.Generator().manual_seed(hash((self.seed, call, rank)))
        return torch.rand(len(x), generator=generator, dtype=torch.float64, device="cpu").to(x.device)

    def state_dict(self) -> dict[str, int]:
        """Return the number of calls, to resume a training."""
        return {"calls": self._calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from the number of calls in a :meth:`state_dict`."""
        if not isinstance(state, Mapping) or "calls" not in state:
            raise TypeError(f"state: expected a mapping with the key 'calls', got {state!r}")
        self._calls = check_count("calls", state["calls"])


def _add(total: list[Tensor | None], gradients: Gradients) -> None:
    """Add gradients to ``total`` in place, those of half precision in float32; None is zero."""
    for i, gradient in enumerate(gradients):
        if gradient is not None:
            part = total[i]
            wide = torch.promote_types(gradient.dtype, torch.float32)
            total[i] = gradient.detach().to(wide) if part is None else part.add_(gradient)


def _restart_rng(device: torch.device) -> Callable[[], None]:
    """Return a function that puts the RNG back, so that a model that draws numbers draws the same ones each time."""
    state = torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restart() -> None:
        torch.set_rng_state(state)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)

    return restart


class _Loss(torch.autograd.Function):
    """A loss whose gradient in each parameter is known; autograd casts it to the parameter's dtype."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(g * grad for g in ctx.gradients)
