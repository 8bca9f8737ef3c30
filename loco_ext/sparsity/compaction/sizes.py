"""Sizes of the values in a graph, as formulas that hold for every input that the model accepts.

An example only shows numbers: 8 tokens may look like 8 channels, and two images of one pixel look alike. Here a size is
a number only if a layer, a parameter or a constant in the code makes it one; otherwise it is a sum of unknown sizes,
such as those of the inputs. Sizes that a layer requires (a convolution its channels, a linear layer its features) hold
in the whole graph, because the model accepts no other input. Operations without a rule have unknown sizes.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn

from loco_ext.sparsity.compaction.layer_norm import features_beside

_ONE = 0  # represents the number 1 among the unknown sizes, which are numbered from 1


@dataclass(frozen=True)
class Size:
    """A sum of unknown sizes, and of :data:`_ONE`, with non-zero coefficients."""

    terms: frozenset[tuple[int, int]]

    @property
    def number(self) -> int | None:
        """The size if it is the same for every input, else None."""
        if not self.terms:
            return 0
        ((unknown, coefficient), *more) = self.terms
        return coefficient if unknown == _ONE and not more else None

    @property
    def is_sum_of_sizes(self) -> bool:
        """Whether nothing is subtracted, so that the size is not negative."""
        return all(coefficient > 0 for _, coefficient in self.terms)

    def __add__(self, other: Size | int) -> Size:
        terms = Counter(dict(self.terms))
        for unknown, coefficient in _size(other).terms:
            terms[unknown] += coefficient
        return _of(terms)

    def __mul__(self, factor: int) -> Size:
        return _of({unknown: coefficient * factor for unknown, coefficient in self.terms})


Sizes = tuple[Size, ...]


def _of(terms: Mapping[int, int]) -> Size:
    return Size(frozenset((unknown, coefficient) for unknown, coefficient in terms.items() if coefficient))


def _size(value: Size | int) -> Size:
    return value if isinstance(value, Size) else _of({_ONE: value})


class Inference:
    """Inference of the sizes of all values in a graph made by :func:`loco_ext.sparsity.compaction.trace.trace`."""

    def __init__(self, traced: fx.GraphModule) -> None:
        self._modules = dict(traced.named_modules())
        self._unknowns: dict[Hashable, int] = {_ONE: _ONE}  # numbers of unknown sizes, by their definition
        self._factors: dict[int, list[Size]] = {}  # factors of unknown sizes that are products
        self._demanded: dict[int, int] = {}  # numbers that layers require for unknown sizes
        self._sizes: dict[fx.Node, Sizes] = {}
        self._integers: dict[fx.Node, Size | Sizes] = {}  # values of nodes that read sizes
        count = -1
        while count < len(self._demanded):
            count = len(self._demanded)
            for node in traced.graph.nodes:
                self._infer(node)

    def of(self, node: fx.Node) -> Sizes:
        """Return the sizes of a tensor."""
        return self._sizes[node]

    def number(self, node: fx.Node, axis: int) -> int | None:
        """Return the size of an axis if it is the same for every input; None if not, or if there is no such axis."""
        sizes = self._sizes.get(node, ())
        return sizes[axis].number if 0 <= axis < len(sizes) else None

    def same(self, one: fx.Node, other: fx.Node) -> bool:
        """Return whether two tensors have the same shape for every input."""
        return self._sizes[one] == self._sizes[other]

    def flattened(self, node: fx.Node) -> Sizes:
        """Return the sizes of a tensor flattened to one row of numbers for each sample."""
        return self._flat(self._sizes[node], 1, -1)

    def _infer(self, node: fx.Node) -> None:
        shape = node.meta.get("shape")
        if shape is None:
            value = self._integer(node)
            if value is not None:
                self._integers[node] = value
            return
        sizes = self._rule(node)
        if sizes is None or len(sizes) != len(shape):
            sizes = tuple(self._unknown((node.name, axis)) for axis in range(len(shape)))
        self._sizes[node] = tuple(self._known(size) for size in sizes)
        self._demand(node)

    def _unknown(self, what: Hashable) -> Size:
        """Return an unknown size, which is identified by its definition."""
        return _of({self._unknowns.setdefault(what, len(self._unknowns)): 1})

    def _known(self, size: Size) -> Size:
        """Return the size with unknown sizes replaced by the numbers that layers require."""
        result = _size(0)
        for unknown, coefficient in size.terms:
            number = self._demanded.get(unknown)
            result += _of({unknown: coefficient}) if number is None else coefficient * number
        return result

    # Sizes that layers require of their inputs.

    def _demand(self, node: fx.Node) -> None:
        module = self._module(node)
        source = node.args[0] if node.args else None
        if module is None or not isinstance(source, fx.Node) or source not in self._sizes:
            return
        sizes = self._sizes[source]
        for axis, number in _demands(module).items():
            if -len(sizes) <= axis < len(sizes):
                self._demand_number(sizes[axis], number)

    def _demand_number(self, size: Size, number: int) -> None:
        terms = dict(size.terms)
        number -= terms.pop(_ONE, 0)
        if len(terms) == 1:
            ((unknown, coefficient),) = terms.items()
            if number % coefficient == 0:
                self._demanded[unknown] = number // coefficient

    def _product(self, factors: Iterable[Size]) -> Size:
        """Return the product as an unknown size times a number; it does not depend on the order of the factors."""
        number, unknowns = 1, []
        for factor in factors:
            terms = list(factor.terms)
            if len(terms) == 1:
                ((unknown, coefficient),) = terms
                number *= coefficient
                if unknown != _ONE:
                    unknowns += self._factors.get(unknown, [_of({unknown: 1})])
            else:
                unknowns.append(factor)
        if len(unknowns) < 2 or not number:
            return (unknowns[0] if unknowns else _size(1)) * number
        result = self._unknown(("product", frozenset(Counter(unknowns).items())))
        ((unknown, _),) = result.terms
        self._factors[unknown] = unknowns
        return self._known(result * number)

    def _module(self, node: fx.Node) -> Any:
        """Return the module that the node calls, if the module alone determines what the call does."""
        module = self._modules[str(node.target)] if node.op == "call_module" else None
        hooked = module is None or module._forward_hooks or module._forward_pre_hooks
        return None if hooked else module

    # Sizes that the model's code reads.

    def _integer(self, node: fx.Node) -> Size | Sizes | None:
        first = node.args[0] if node.args else None
        sizes = self._sizes.get(first) if isinstance(first, fx.Node) else None
        if node.op == "call_method" and node.target == "size" and sizes is not None:
            return self._picked(sizes, node.args[1]) if len(node.args) > 1 else sizes
        if node.target is getattr and sizes is not None:
            return sizes if node.args[1] == "shape" else None
        values: list[Any] = [self._integers.get(arg, arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
        if node.target is operator.getitem and isinstance(values[0], tuple):
            return self._picked(values[0], node.args[1])
        if len(values) != 2 or not all(isinstance(value, Size | int) for value in values):
            return None
        if node.target is operator.add:
            return _size(values[0]) + values[1]
        if node.target is operator.sub:
            return _size(values[0]) + _size(values[1]) * -1
        if node.target is operator.mul:
            return self._product([_size(values[0]), _size(values[1])])
        if node.target is operator.floordiv and isinstance(values[1], int) and values[1] > 0:
            return self._divided(_size(values[0]), values[1])
        return None

    def _picked(self, sizes: Sizes, place: Any) -> Size | Sizes | None:
        return sizes[place] if isinstance(place, int) and -len(sizes) <= place < len(sizes) else None

    def _divided(self, size: Size, divisor: int) -> Size:
        """Return the quotient, rounded down."""
        whole, rest = {}, {}
        for unknown, coefficient in size.terms:
            whole[unknown], rest[unknown] = divmod(coefficient, divisor)
        remainder = _of(rest)
        if remainder.number is not None:
            return _of(whole)
        return _of(whole) + self._unknown(("divided", remainder, divisor))

    # Sizes of the results of operations.

    def _rule(self, node: fx.Node) -> Sizes | None:
        if node.op == "placeholder":
            return None
        if node.op == "get_attr":
            return tuple(_size(length) for length in node.meta["shape"])
        first: Any = node.args[0] if node.args else None
        if node.op == "call_module":
            module = self._module(node)
            plain = isinstance(first, fx.Node) and first in self._sizes and len(node.args) == 1 and not node.kwargs
            return self._layer(module, self._sizes[first]) if module is not None and plain else None
        name = _name(node)
        if name in _JOINS:
            return self._joined(first, node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0))
        if name in _ARITHMETIC:
            return self._broadcast(node.args)
        if not isinstance(first, fx.Node):
            return None
        if first not in self._sizes:
            return self._part(first, node.args[1]) if name == "getitem" else None
        sizes = self._sizes[first]
        if node.target in _MAX_POOLS:
            options: Any = node.args[1:], node.kwargs
            plain = node.all_input_nodes == [first]
            return self._max_pooled(_MAX_POOLS[node.target], sizes, *options[0], **options[1]) if plain else None
        if name in _KEEP_SIZES:
            bounds = [x for x in node.all_input_nodes if x is not first and x in self._sizes]
            return None if name in ("clamp", "clip") and bounds else sizes
        rule = getattr(self, f"_of_{name}", None)
        return None if rule is None else rule(node, sizes, node.args[1:])

    def _layer(self, module: nn.Module, sizes: Sizes) -> Sizes | None:
        """Return the sizes of the result of one of torch's layers."""
        kind, layer = type(module), cast(Any, module)
        family = kind.__module__.rpartition(".")[2]
        if not kind.__module__.startswith("torch.nn.modules."):
            return None
        if kind is nn.Linear:
            return (*sizes[:-1], _size(layer.out_features))
        if kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
            spatial = layer.weight.dim() - 2
            lengths = (
                self._window(size, kernel, stride, dilation, padding)
                for size, kernel, stride, dilation, padding in zip(
                    sizes[-spatial:], layer.kernel_size, layer.stride, layer.dilation, _paddings(layer), strict=True
                )
            )
            return (*sizes[: -spatial - 1], _size(layer.out_channels), *lengths)
        if kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
            spatial = layer.weight.dim() - 2
            names = ("kernel_size", "stride", "dilation", "padding", "output_padding")
            numbers = zip(*(getattr(layer, name) for name in names), strict=True)
            lengths = (
                (size + -1) * stride + (dilation * (kernel - 1) + extra + 1 - 2 * padding)
                for size, (kernel, stride, dilation, padding, extra) in zip(sizes[-spatial:], numbers, strict=True)
            )
            return (*sizes[: -spatial - 1], _size(layer.out_channels), *lengths)
        if kind is nn.Flatten:
            return self._flat(sizes, layer.start_dim, layer.end_dim)
        if kind is nn.Upsample:
            return self._upsampled(layer, sizes)
        if kind in (nn.Identity, nn.ChannelShuffle) or family in _FAMILIES_THAT_KEEP_SIZES:
            return None if kind in (nn.GLU, nn.MultiheadAttention) else sizes
        if family == "pooling" and getattr(layer, "return_indices", False) is False:
            return self._pooled(layer, sizes)
        return None

    def _pooled(self, layer: Any, sizes: Sizes) -> Sizes | None:
        name = type(layer).__name__
        axes = int(name[-2])
        if name.startswith("Adaptive"):
            return _adapted(sizes, axes, layer.output_size)
        if name.startswith("AvgPool"):
            return self._max_pooled(axes, sizes, layer.kernel_size, layer.stride, layer.padding, 1, layer.ceil_mode)
        if name.startswith("MaxPool"):
            options = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode)
            return self._max_pooled(axes, sizes, *options)
        return None

    def _max_pooled(
        self,
        axes: int,
        sizes: Sizes,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Sizes | None:
        options = (_each(option, axes) for option in (kernel_size, stride or kernel_size, dilation, padding))
        if return_indices:
            return None
        windows = zip(sizes[-axes:], *options, strict=True)
        return (*sizes[:-axes], *(self._window(n, k, s, d, 2 * p, ceil_mode) for n, k, s, d, p in windows))

    def _window(self, size: Size, kernel: int, stride: int, dilation: int, padding: int, up: bool = False) -> Size:
        """Return the number of positions of a window along an axis that is longer by ``padding``."""
        if up and stride > 1:
            return self._unknown(("rounded up", size, kernel, stride, dilation, padding))
        return self._divided(size + (padding - dilation * (kernel - 1) - 1), stride) + 1

    def _upsampled(self, layer: Any, sizes: Sizes) -> Sizes:
        axes = len(sizes) - 2
        given = layer.size if layer.size is not None else layer.scale_factor
        each = given if isinstance(given, tuple | list) else (given,) * axes
        if layer.size is not None:
            return (*sizes[:2], *(_size(int(length)) for length in each))
        lengths = (
            size * int(scale) if scale == int(scale) else self._unknown(("scaled", size, scale))
            for size, scale in zip(sizes[2:], each, strict=True)
        )
        return (*sizes[:2], *lengths)

    def _broadcast(self, operands: Sequence[Any]) -> Sizes | None:
        """Return the sizes of the result of arithmetic on a tensor and a number, or on two tensors."""
        if any(isinstance(x, fx.Node) and x not in self._sizes and x not in self._integers for x in operands):
            return None
        tensors = [self._sizes[x] for x in operands if isinstance(x, fx.Node) and x in self._sizes]
        rank = max(map(len, tensors), default=0)
        one, *others = [(_size(1),) * (rank - len(sizes)) + sizes for sizes in tensors] or [()]
        return tuple(self._common(a, b) for a, b in zip(one, others[0], strict=True)) if others else one

    def _common(self, one: Size, other: Size) -> Size:
        """Return the size that two sizes broadcast to."""
        if one == other or other.number == 1:
            return one
        if one.number == 1 or other.number is not None:  # a size that broadcasts with a number is 1 or that number
            return other
        return one if one.number is not None else self._unknown(("common", frozenset([one, other])))

    def _joined(self, parts: Any, dim: Any) -> Sizes | None:
        if not isinstance(parts, list | tuple) or not parts or not isinstance(dim, int):
            return None
        if not all(isinstance(part, fx.Node) and part in self._sizes for part in parts):
            return None
        sizes = [self._sizes[part] for part in parts]
        rank = len(sizes[0])
        if any(len(each) != rank for each in sizes) or not -rank <= dim < rank:
            return None
        dim %= rank
        total = _size(0)
        for each in sizes:
            total += each[dim]
        return (*sizes[0][:dim], total, *sizes[0][dim + 1 :])

    def _part(self, whole: fx.Node, place: Any) -> Sizes | None:
        """Return the sizes of one tensor of the tuple returned by split or chunk."""
        source = whole.args[0] if whole.args else None
        name = _name(whole)
        if name not in ("chunk", "split") or source not in self._sizes or len(whole.args) < 2:
            return None
        count, sizes = whole.args[1], self._sizes[source]  # type: ignore[index]
        dim = whole.args[2] if len(whole.args) > 2 else whole.kwargs.get("dim", 0)
        if len(whole.all_input_nodes) > 1 or not isinstance(dim, int) or not isinstance(place, int):
            return None
        number = sizes[dim].number
        if number is None:
            return None
        parts = getattr(torch, name)(torch.empty(number, device="meta"), count)
        dim %= len(sizes)
        return (*sizes[:dim], _size(len(parts[place])), *sizes[dim + 1 :])

    # Rules of functions and methods, by name.

    def _of_getitem(self, node: fx.Node, sizes: Sizes, args: Any) -> Sizes | None:
        places = args[0] if isinstance(args[0], tuple) else (args[0],)
        if not all(isinstance(place, slice) or place is ... for place in places):
            return None
        if ... in places:
            before = places.index(...)
            gap = len(sizes) - len(places) + 1
            places = (*places[:before], *[slice(None)] * gap, *places[before + 1 :])
        rest = sizes[len(places) :]
        return (*(self._slice(size, place) for size, place in zip(sizes, places, strict=False)), *rest)

    def _slice(self, size: Size, place: slice) -> Size:
        start, stop, step = place.start, place.stop, place.step
        if (start in (None, 0)) and stop is None and step in (None, 1):
            return size
        if any(isinstance(limit, fx.Node) for limit in (start, stop, step)):
            return self._unknown(("slice", size, start, stop, step))
        if size.number is not None:
            return _size(len(range(*place.indices(size.number))))
        shorter = size + (-(start or 0) + (stop or 0))
        if step in (None, 1) and (start or 0) >= 0 >= (stop or 0) and stop != 0 and shorter.is_sum_of_sizes:
            return shorter
        return self._unknown(("slice", size, start, stop, step))

    def _of_pad(self, node: fx.Node, sizes: Sizes, args: Any) -> Sizes | None:
        pads = args[0] if args else node.kwargs.get("pad")
        if not isinstance(pads, list | tuple) or not all(isinstance(p, int) for p in pads) or len(pads) % 2:
            return None
        result = list(sizes)
        for axis in range(len(pads) // 2):
            result[-1 - axis] += pads[2 * axis] + pads[2 * axis + 1]
        return tuple(result)

    def _of_mean(self, node: fx.Node, sizes: Sizes, args: Any) -> Sizes | None:
        axes = args[0] if args else node.kwargs.get("dim")
        keep = args[1] if len(args) > 1 else node.kwargs.get("keepdim", False)
        axes = [axes] if isinstance(axes, int) else axes
        if not isinstance(axes, list | tuple) or not all(isinstance(axis, int) for axis in axes):
            return None
        gone = {axis % len(sizes) for axis in axes}
        return tuple(_size(1) if axis in gone else size for axis, size in enumerate(sizes) if keep or axis not in gone)

    _of_sum = _of_mean

    def _of_permute(self, node: fx.Node, sizes: Sizes, args: Any) -> Sizes | None:
        axes = args[0] if args and isinstance(args[0], list | tuple) else args
        return tuple(sizes[axis] for axis in axes) if all(isinstance(axis, int) for axis in axes) else None

    def _of_transpose(self, node: fx.Node, sizes: Sizes, args: Any) -> Sizes | None:
        if len(args) != 2 or not all(isinstance(axis, int) for axis in args):
            return None
        result = list(sizes)
        result[args[0]], result[args[1]] = sizes[args[1]], sizes[args[0]]
        return tuple(result)

    def _of_unsqueeze(self, node: fx.Node, sizes: Sizes, args: Any) -> Sizes | None:
        if len(args) != 1 or not isinstance(args[0], int):
            return None
        place = args[0] % (len(sizes) + 1)
        return (*sizes[:place], _size(1), *sizes[place:])

    def _of_flatten(self, node: fx.Node, sizes: Sizes, args: Any) -> Sizes | None:
        start = args[0] if args else node.kwargs.get("start_dim", 0)
        end = args[1] if len(args) > 1 else node.kwargs.get("end_dim", -1)
        return self._flat(sizes, start, end) if isinstance(start, int) and isinstance(end, int) else None

    def _of_view(self, node: fx.Node, sizes: Sizes, args: Any) -> Sizes | None:
        if node.kwargs:
            return None
        asked = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        new: list[Any] = [self._integers.get(length) if isinstance(length, fx.Node) else length for length in asked]
        if len(new) == 1 and isinstance(new[0], tuple):  # the whole shape of another tensor
            return new[0]
        if not all(isinstance(length, Size | int) for length in new):
            return None
        lengths = [None if length == -1 else _size(length) for length in new]
        if None not in lengths:
            return tuple(length for length in lengths if length is not None)
        rest = self._quotient(list(sizes), [length for length in lengths if length is not None])
        return tuple(rest or self._unknown((node.name, "rest")) if length is None else length for length in lengths)

    _of_reshape = _of_view

    def _quotient(self, factors: list[Size], divisors: list[Size]) -> Size | None:
        """Return the quotient of the two products if only numbers and equal sizes have to be cancelled, else None."""
        coefficient = 1
        for divisor in divisors:
            if divisor in factors:
                factors.remove(divisor)
            elif divisor.number:
                coefficient *= divisor.number
            else:
                return None
        whole = self._product(factors)
        if any(number % coefficient for _, number in whole.terms):
            return None
        return _of({unknown: number // coefficient for unknown, number in whole.terms})

    def _flat(self, sizes: Sizes, start: int, end: int) -> Sizes:
        start, end = start % len(sizes), end % len(sizes)
        return (*sizes[:start], self._product(sizes[start : end + 1]), *sizes[end + 1 :])

    def _of_take_channels(self, node: fx.Node, sizes: Sizes, args: Any) -> Sizes | None:
        index = self._sizes.get(args[0])
        if index is None:
            return None
        axis = (args[1] if len(args) > 1 else 1) % len(sizes)
        return (*sizes[:axis], index[0], *sizes[axis + 1 :])

    def _of_layer_norm_with_constants(self, node: fx.Node, sizes: Sizes, args: Any) -> Sizes | None:
        _, _, variance, _ = args
        return (*sizes[:-1], sizes[-1] + features_beside(variance))

    def _of_adaptive_avg_pool1d(self, node: fx.Node, sizes: Sizes, args: Any) -> Sizes | None:
        return _adapted(sizes, 1, args[0] if args else node.kwargs.get("output_size"))

    def _of_adaptive_avg_pool2d(self, node: fx.Node, sizes: Sizes, args: Any) -> Sizes | None:
        return _adapted(sizes, 2, args[0] if args else node.kwargs.get("output_size"))

    def _of_adaptive_avg_pool3d(self, node: fx.Node, sizes: Sizes, args: Any) -> Sizes | None:
        return _adapted(sizes, 3, args[0] if args else node.kwargs.get("output_size"))


_MAX_POOLS = {F.max_pool1d: 1, F.max_pool2d: 2, F.max_pool3d: 3}  # numbers of spatial axes
_JOINS = ("cat", "concat", "concatenate")
_ARITHMETIC = {"add", "sub", "mul", "div", "truediv", "iadd", "isub", "imul", "itruediv"}
_FAMILIES_THAT_KEEP_SIZES = {"activation", "dropout", "batchnorm", "instancenorm", "normalization"}
_SIZES_KEPT = (
    "relu relu6 leaky_relu elu selu celu gelu silu mish sigmoid tanh hardswish hardsigmoid hardtanh softplus "
    "logsigmoid abs neg square sqrt exp log clamp clip dropout dropout1d dropout2d dropout3d contiguous clone detach "
    "softmax log_softmax layer_norm group_norm batch_norm instance_norm normalize flip roll cumsum float double half "
    "bfloat16 zeros_like ones_like"
)
_KEEP_SIZES = set(_SIZES_KEPT.split())


def _name(node: fx.Node) -> str:
    """Return the name of a torch function or method without a trailing underscore; "" for any other function."""
    if node.op == "call_method":
        return str(node.target).rstrip("_")
    library = str(getattr(node.target, "__module__", None)).partition(".")[0]
    known = library in ("None", "_operator", "torch", "loco_ext")
    return getattr(node.target, "__name__", "").rstrip("_") if known else ""


def _demands(module: nn.Module) -> dict[int, int]:
    """Return the input sizes that the module requires, by axis."""
    kind, layer = type(module), cast(Any, module)
    if kind is nn.Linear:
        return {-1: layer.in_features}
    if kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
        return {1 - layer.weight.dim(): layer.in_channels}
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        return {1: layer.num_features} if layer.affine or layer.running_mean is not None else {}
    if kind is nn.GroupNorm:
        return {1: layer.num_channels} if layer.affine else {}
    if kind is nn.LayerNorm:
        return {axis - len(layer.normalized_shape): number for axis, number in enumerate(layer.normalized_shape)}
    if kind is nn.PReLU and layer.num_parameters > 1:
        return {1: layer.num_parameters}
    return {}


def _paddings(module: Any) -> list[int]:
    """Return by how much a convolution's padding extends each axis."""
    if module.padding == "valid":
        return [0] * len(module.kernel_size)
    if module.padding == "same":
        return [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    return [2 * p for p in module.padding]


def _each(option: Any, axes: int) -> tuple[Any, ...]:
    """Return a layer's option for each of its axes."""
    return tuple(option) if isinstance(option, tuple | list) else (option,) * axes


def _adapted(sizes: Sizes, axes: int, output_size: Any) -> Sizes | None:
    """Return the sizes of the result of an adaptive pooling."""
    given = _each(output_size, axes)
    if not all(length is None or isinstance(length, int) for length in given):
        return None
    lengths = (old if new is None else _size(new) for old, new in zip(sizes[-axes:], given, strict=True))
    return (*sizes[:-axes], *lengths)
