"""Convolutions without weight sharing: each pair of an output pixel and an input pixel has its own block of weights.

These layers lie between a convolution and full connection (eFCN, section 3): a layer starts with the pixel pairs of a
convolution, can grow up to full connection, and can be converted back.
"""

import math
import warnings
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from loco_ext import ops
from loco_ext.argument_checks import check_choice, check_count, check_ints, check_tensor
from loco_ext.geometry import BlockPattern
from loco_ext.geometry.attached_pattern import SharedPattern, attach_pattern, attached_pattern
from loco_ext.geometry.conv import Ints, Padding
from loco_ext.nn.conversions import from_conv, to_conv, to_dense
from loco_ext.nn.deviations import Deviation, deviation
from loco_ext.nn.pruning import blocks_to_keep
from loco_ext.nn.resizing import loaded_pattern, replace, resize
from loco_ext.ops import autocast
from loco_ext.ops.block_sparse import contiguous, ignore_tracer_warnings
from loco_ext.ops.memory_format import suggests_channels_last

_INDICES = ("crow_indices", "col_indices")


class LocallyConnectedNd(nn.Module):
    """Base class of the layers with 1, 2 and 3 spatial axes; see :class:`LocallyConnected2d`."""

    axes: ClassVar[int]
    weight: nn.Parameter
    bias: nn.Parameter | None
    _backward_step: Any = None  # see loco_ext.optim.step_in_backward
    _shared: SharedPattern | None = None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Ints,
        stride: Ints = 1,
        padding: Padding = 0,
        dilation: Ints = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        input_size: Ints,
    ) -> None:
        super().__init__()
        self.groups = check_count("groups", groups, smallest=1)
        self.in_channels = _check_channels("in_channels", in_channels, groups)
        self.out_channels = _check_channels("out_channels", out_channels, groups)
        size = check_ints("input_size", input_size, self.axes)
        pattern = BlockPattern.from_conv(size, kernel_size, stride, padding, dilation, padding_mode)
        conv: Any = pattern.conv
        self.input_size, self.output_size = conv.input_size, conv.output_size
        self.kernel_size, self.stride, self.dilation = conv.kernel_size, conv.stride, conv.dilation
        self.padding = padding if isinstance(padding, str) else _as_ints(conv.padding)
        self.padding_mode = padding_mode
        shape = (pattern.nnz, groups, in_channels // groups, out_channels // groups)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty((pattern.n_out, out_channels), device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self._set_pattern(pattern)
        self.reset_parameters()

    @property
    def values(self) -> nn.Parameter:
        """Former name of ``weight``."""
        _warn_of_former_name()
        return self.weight

    def __dir__(self) -> list[str]:
        """Return the names without the former one, as torch.jit.trace and others read all attributes of a module."""
        return [name for name in super().__dir__() if name != "values"]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "values":
            _warn_of_former_name()
            name = "weight"
        if name in _INDICES:  # torch.func.functional_call sets all entries of a state dict
            if not isinstance(value, Tensor) or not torch.equal(value.cpu(), getattr(self, name)):
                raise ValueError(f"{name}: expected the layer's; load_state_dict, grow and prune change its pattern")
            return
        super().__setattr__(name, value)
        if name == "weight":
            self._share_pattern(value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if name == "weight":
            self._share_pattern(param)

    def _share_pattern(self, weight: Tensor | None) -> None:
        """Share the pattern of a weight that has taken the place of another, or give it the layer's."""
        if self._shared is None:
            return
        if isinstance(weight, nn.Parameter) and attached_pattern(weight) is None:  # such as a sharded one
            self._shared = attach_pattern(weight, self._shared.pattern)
        else:
            self._shared = self._pattern_of_weight() or SharedPattern(self._shared.pattern)

    @property
    def pattern(self) -> BlockPattern:
        """The pattern of the weight's blocks. Layers of the same geometry that share a weight share it."""
        assert self._shared is not None
        return (self._pattern_of_weight() or self._shared).pattern

    def _pattern_of_weight(self) -> SharedPattern | None:
        """Return the pattern that is attached to the weight, unless it is of another geometry."""
        attached = attached_pattern(self._parameters.get("weight"))
        if attached is None or attached is self._shared or self._shared is None:
            return attached
        return attached if attached.pattern.conv == self._shared.pattern.conv else None

    @property
    def crow_indices(self) -> Tensor:
        """Index of the first block of each output pixel, int64 ``[n_out + 1]``, on the CPU."""
        return self.pattern.to("cpu").crow_indices

    @property
    def col_indices(self) -> Tensor:
        """Input pixel of each block, int64 ``[nnz]``, on the CPU."""
        return self.pattern.to("cpu").col_indices

    @torch.no_grad()
    def reset_parameters(self, like: str = "conv") -> None:
        """Reinitialise all parameters at random.

        Args:
            like: ``"conv"`` initialises like nn.Conv: each output pixel has weights of its own, uniform between
                ``+-1 / sqrt(n_taps * C_in / groups)``. Where several of its taps read one pixel, their weights add up.
                Blocks outside of the receptive field become zero. ``"linear"`` initialises like nn.Linear: all blocks
                of a grown layer alike, uniform between ``+-1 / sqrt(n)``, where an output pixel has blocks for ``n``
                inputs.

        Raises:
            ValueError: ``like`` is unknown.
        """
        check_choice("like", like, ("conv", "linear"))
        depth = self.in_channels // self.groups
        if like == "conv":
            bound = 1 / math.sqrt(depth * math.prod(self.kernel_size))
            block = self.pattern.taps.block.to(self.weight.device)
            draws = self.weight.new_empty((len(block), *self.weight.shape[1:])).uniform_(-bound, bound)
            self.weight.zero_().index_add_(0, block, draws)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)
        else:
            pattern, device = self.pattern.to("cpu"), self.weight.device
            bounds = (pattern.crow_indices.diff().clamp(min=1) * depth).rsqrt().to(device, self.weight.dtype)
            self.weight.uniform_(-1, 1).mul_(bounds[pattern.row_indices.to(device)].view(-1, 1, 1, 1))
            if self.bias is not None:
                self.bias.uniform_(-1, 1).mul_(bounds.view(-1, 1))

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(N, C_in, *input_size)`` to ``(N, C_out, *output_size)``; both without N if ``input`` has none.

        If ``input`` is ``channels_last``, so is the output, and no activations are copied. (With circular padding, the
        output of nn.Conv is not.) Otherwise the output is contiguous, and ``input`` and the output are converted once
        in each pass.

        Raises:
            TypeError: ``input`` is not a tensor, or its dtype or device is not that of the layer.
            ValueError: ``input`` has another shape; the layer accepts one input size only.
        """
        with ignore_tracer_warnings():
            weight = self.weight
            if isinstance(weight, nn.Parameter) and attached_pattern(weight) is None:  # such as a swapped one
                self._share_pattern(weight)
            self._check_input(input, weight)
            batch, pattern = input if input.dim() == self.axes + 2 else input.unsqueeze(0), self.pattern
            if pattern.crow_indices.device != input.device:
                pattern = pattern.to(input.device)
            # In this order, the gradient of one image has the strides of channels_last, as torch's batch norms need it.
            pixels = batch.movedim(1, -1).flatten(1, -2)
            consume = self._backward_step and self._backward_step.of(weight)
            y = ops.block_sparse_matmul(pixels, weight, pattern, self.bias, consume=consume)
            y = y.view(y.shape[0], *self.output_size, y.shape[2]).movedim(-1, 1)
            if not suggests_channels_last(batch):
                y = contiguous(y)
            return y if input.dim() == self.axes + 2 else y.squeeze(0)

    @classmethod
    def from_conv(cls, conv: nn.Module, input_size: Ints) -> Self:
        """Return the layer that computes the same as a convolution, with separate weights at each position.

        Args:
            conv: an nn.Conv module with the same number of axes and any geometry. The layer takes over its dtype,
                device, training mode and the ``requires_grad`` of its parameters.
            input_size: spatial size of the images.

        Raises:
            TypeError: ``conv`` is another module, overrides forward, has hooks other than those of torch.nn.utils that
                compute its tensors, or is lazy and has not run yet.
            ValueError: the convolution itself would refuse such an image.
        """
        return from_conv(cls, conv, input_size)

    def to_conv(self) -> nn.Module:
        """Return the convolution nearest to this layer, its orthogonal projection; undoes :meth:`from_conv`.

        The weights of each tap are the means of its blocks over positions, and the biases the means over output pixels.
        Where taps share blocks, on small images with circular, reflected or replicated padding, the weights are the
        least squares solution. Blocks outside of the receptive fields are lost; :func:`loco_ext.nn.deviation` measures
        how much that is.

        Returns:
            An nn.Conv module; if the padding before and after differs, an nn.Sequential of a padding module and it.
        """
        return to_conv(self)

    def to_dense(self) -> nn.Linear:
        """Return an nn.Linear that computes the same map, with zeros where this layer has no weights.

        ``linear(x.flatten(1)).view(layer(x).shape)`` is equal to ``layer(x)``.

        Its weight has ``C_out * n_out * C_in * n_in`` elements: 17 GB in float32 for 64 channels of 32x32 pixels.
        """
        return to_dense(self)

    @torch.inference_mode(False)  # the new blocks and pattern are for training, whatever mode the caller is in
    def grow(self, radius: int, optimizer: Optimizer | None = None) -> Self:
        """Add blocks to each output pixel for all input pixels at most ``radius`` from those that it reads, in place.

        The new blocks are zero and the output is unchanged, bit for bit. A ``radius`` as large as the image connects
        all pixels. Call it between two training steps: ``weight`` stays the same object, with more blocks, and its
        gradient is cleared. torch.compile recompiles. Whatever depends on its size, such as DistributedDataParallel or
        an averaged model, has to be created again.

        Args:
            radius: number of input pixels, at least 0.
            optimizer: the optimizer that steps ``weight``. Its states of ``weight`` are zero for the new blocks. If it
                is not given, an optimizer that keeps states fails in its next step.

        Returns:
            The layer itself.

        Raises:
            TypeError: ``radius`` is not an int; ``optimizer`` is not an optimizer, or has states of other shapes than
                ``weight``; ``weight`` is sharded.
            ValueError: ``radius`` is negative, or the optimizer does not step ``weight``.
        """
        pattern, places = self.pattern.grow(radius)
        places, shape = places.to(self.weight.device), (pattern.nnz, *self.weight.shape[1:])
        resize(self.weight, lambda old: old.new_zeros(shape).index_copy_(0, places, old), optimizer)
        self._set_pattern(pattern)
        return self

    @torch.inference_mode(False)
    def prune(
        self,
        keep: Tensor | None = None,
        *,
        threshold: float | None = None,
        radius: int | None = None,
        optimizer: Optimizer | None = None,
    ) -> Self:
        """Remove blocks, selected by exactly one of three arguments, in place as :meth:`grow` does.

        Args:
            keep: bool ``[nnz]``, True for the blocks that stay.
            threshold: removes blocks whose norm is at most this; 0 removes the blocks of zeros.
            radius: removes blocks that are more than this many pixels outside of their receptive field; 0 removes all
                that :meth:`grow` has added.
            optimizer: as for :meth:`grow`; the same blocks are removed from its states.

        Returns:
            The layer itself.

        Raises:
            TypeError: not exactly one of the three is given, one has a wrong type, or as for :meth:`grow`.
            ValueError: a wrong shape, a negative number, or as for :meth:`grow`.
        """
        mask = blocks_to_keep(self.weight, self.pattern, keep, threshold, radius)
        pattern, kept = self.pattern.prune(mask)
        kept = kept.to(self.weight.device)
        resize(self.weight, lambda old: old[kept], optimizer)
        self._set_pattern(pattern)
        return self

    def deviation(self) -> Deviation:
        """Return how far the layer is from a convolution, :func:`loco_ext.nn.deviation` of this layer alone."""
        return deviation(self)

    def extra_repr(self) -> str:
        """Return the arguments as nn.Conv shows them, with the input size and the number of blocks."""
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"]
        if isinstance(self.padding, str) or self.padding != (0,) * self.axes:
            parts.append(f"padding={self.padding!r}")
        if self.dilation != (1,) * self.axes:
            parts.append(f"dilation={self.dilation}")
        if self.groups != 1:
            parts.append(f"groups={self.groups}")
        if self.bias is None:
            parts.append("bias=False")
        if self.padding_mode != "zeros":
            parts.append(f"padding_mode={self.padding_mode!r}")
        return ", ".join([*parts, f"input_size={self.input_size}", f"blocks={self.pattern.nnz}"])

    def _set_pattern(self, pattern: BlockPattern) -> None:
        """Set the pattern, on the device of the weight, with its transpose cached for tracing by torch.compile."""
        device = self.weight.device
        pattern = pattern if device.type == "meta" else pattern.to(device)
        pattern.transpose()
        self._shared = attach_pattern(self.weight, pattern)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        def apply(tensor: Tensor) -> Tensor:
            """Keep weights contiguous: a memory format for images would make every pass copy them."""
            applied = fn(tensor)
            return applied.contiguous() if tensor.is_contiguous() else applied

        pattern = self.pattern
        super()._apply(apply, recurse)
        self._set_pattern(pattern)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        parameters = state["_parameters"]
        if "values" in parameters:  # a pickle of an earlier version
            renamed = {"weight" if name == "values" else name: parameter for name, parameter in parameters.items()}
            state = {**state, "_parameters": renamed}
        if "pattern" in state:  # also of an earlier version
            state = {**state, "_shared": SharedPattern(state["pattern"])}
            del state["pattern"]
        super().__setstate__(state)
        self._set_pattern(self.pattern)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in _INDICES:  # clones, so that loading into them in place cannot change the pattern
            destination[prefix + name] = getattr(self, name).clone()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load a state dict; blocks of a grown or pruned layer of the same geometry replace those of this layer."""
        if prefix + "values" in state_dict:  # the name in earlier versions
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "values")
        names = [prefix + name for name in _INDICES]
        missing_keys.extend(name for name in names if name not in state_dict)
        crow, col, weight = map(state_dict.get, (*names, prefix + "weight"))
        try:
            if not isinstance(self.weight, nn.Parameter):  # computed from others, which keep their blocks
                weight = self.weight
            pattern = loaded_pattern(self.pattern, self.weight.shape[1:], crow, col, weight)
            if pattern is not self.pattern:
                if not isinstance(self.weight, nn.Parameter):
                    raise ValueError("expected its own blocks, as its weight is computed, got others")
                with torch.inference_mode(False), torch.no_grad():  # a tensor of inference mode could not be trained
                    blocks = self.weight.new_empty((pattern.nnz, *self.weight.shape[1:]))
                    if not local_metadata.get("assign_to_params_buffers"):
                        blocks.copy_(weight)  # type: ignore[arg-type]  # an error here leaves the layer as it is
                    replace(self.weight, blocks)
                self._set_pattern(pattern)
        except (TypeError, ValueError, RuntimeError) as error:
            error_msgs.append(f"While loading the blocks of {prefix[:-1] or 'the layer'}: {error}")
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        unexpected_keys[:] = [name for name in unexpected_keys if name not in names]
        self._set_pattern(self.pattern)

    def _check_input(self, x: Tensor, weight: Tensor) -> None:
        check_tensor("input", x)
        shape = (self.in_channels, *self.input_size)
        if x.shape[-len(shape) :] != shape or x.dim() > len(shape) + 1:
            sizes = ", ".join(map(str, shape))
            raise ValueError(
                f"input: expected shape (N, {sizes}) or ({sizes}), as in_channels and input_size of the layer have it, "
                f"got {tuple(x.shape)}"
            )
        if x.device != weight.device:
            raise TypeError(f"input: expected device {weight.device} as the weight of the layer, got {x.device}")
        if x.dtype != weight.dtype and not autocast.is_enabled(x.device.type):
            raise TypeError(f"input: expected {weight.dtype} as the weight of the layer, got {x.dtype}")


class LocallyConnected1d(LocallyConnectedNd):
    """nn.Conv1d without weight sharing; see :class:`LocallyConnected2d`.

    Example:
        >>> import torch
        >>> from loco_ext import nn
        >>> layer = nn.LocallyConnected1d(2, 4, kernel_size=3, padding="same", input_size=10)
        >>> layer(torch.randn(5, 2, 10)).shape
        torch.Size([5, 4, 10])
    """

    axes = 1


class LocallyConnected2d(LocallyConnectedNd):
    """nn.Conv2d without weight sharing: each output pixel has filters of its own (eFCN, section 3).

    Zero padding has no weights. :meth:`grow` relaxes the locality as well, up to full connection, and :meth:`to_conv`
    goes back to a convolution. The state dict contains the pattern beside ``weight``, as ``crow_indices`` and
    ``col_indices``: a layer of the same geometry that loads it takes over the blocks, including grown and pruned ones.

    Args:
        in_channels, out_channels, kernel_size, stride, dilation, groups, bias, padding_mode, device, dtype: as for
            nn.Conv2d.
        padding: as for nn.Conv2d; for each axis, a pair ``(before, after)`` may take the place of an int.
        input_size: height and width of all images that the layer accepts, or an int for both.

    Attributes:
        weight: parameter ``[nnz, groups, C_in / groups, C_out / groups]``, one block for each pair of the pattern.
        bias: parameter ``[n_out, C_out]``, or None.
        pattern: :class:`loco_ext.geometry.BlockPattern` of the output pixels' blocks for input pixels.
        output_size: height and width of the outputs.

    Raises:
        TypeError, ValueError: as for :class:`loco_ext.geometry.ConvGeometry`; a number of channels is below 1 or not a
            multiple of ``groups``.

    Source:
        d'Ascoli, Sagun, Bruna, Biroli, "Finding the Needle in the Haystack with Convolutions" (2019), section 3.

    Example:
        >>> import torch
        >>> from loco_ext import nn
        >>> conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        >>> layer = nn.LocallyConnected2d.from_conv(conv, input_size=(6, 6))
        >>> layer
        LocallyConnected2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), input_size=(6, 6), blocks=256)
        >>> x = torch.randn(2, 3, 6, 6)
        >>> torch.allclose(layer(x), conv(x), atol=1e-5)
        True
        >>> optimizer = torch.optim.Adam(layer.parameters())
        >>> layer(x).square().sum().backward()
        >>> optimizer.step()
        >>> layer.grow(6, optimizer).weight.shape
        torch.Size([1296, 1, 3, 8])
        >>> layer.to_conv()
        Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """

    axes = 2


class LocallyConnected3d(LocallyConnectedNd):
    """nn.Conv3d without weight sharing; see :class:`LocallyConnected2d`.

    Example:
        >>> import torch
        >>> from loco_ext import nn
        >>> layer = nn.LocallyConnected3d(2, 4, kernel_size=3, stride=2, input_size=(5, 5, 7))
        >>> layer(torch.randn(3, 2, 5, 5, 7)).shape
        torch.Size([3, 4, 2, 2, 3])
    """

    axes = 3


def _warn_of_former_name() -> None:
    warnings.warn("values: the parameter is called weight; this name will go", DeprecationWarning, stacklevel=3)


def _check_channels(name: str, channels: int, groups: int) -> int:
    if check_count(name, channels, smallest=1) % groups:
        raise ValueError(f"{name}: expected a multiple of groups, {groups}, got {channels}")
    return int(channels)


def _as_ints(pads: tuple[tuple[int, int], ...]) -> tuple[int | tuple[int, int], ...]:
    """Return the padding as nn.Conv has it if both sides of each axis are equal, else the pairs."""
    even = all(before == after for before, after in pads)
    return tuple(before for before, _ in pads) if even else pads
