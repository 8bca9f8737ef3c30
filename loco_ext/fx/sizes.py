"""Sizes of the values in a graph, as formulas that hold for every input that the model accepts.

An example only shows numbers: 8 tokens may look like 8 channels, and two images of one pixel look alike. Here a size is
a number only if a layer, a parameter or a constant in the code makes it one; otherwise it is a sum of unknown sizes,
such as those of the inputs. Sizes that a layer requires (a convolution its channels, a linear layer its features) hold
in the whole graph, because the model accepts no other input. Operations without a rule have unknown sizes.
"""

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import fx, nn

from loco_ext.fx.branches import length
from loco_ext.fx.modules import has_forward_hooks, paddings, per_axis
from loco_ext.fx.operations import (
    ADAPTIVE_POOLS,
    ARITHMETIC,
    KEEPING_SHAPE,
    POOLS,
    REDUCTIONS,
    argument,
    axes_in_order,
    is_constant_slice,
    module_of,
    numbered_axes,
    operation,
)
from loco_ext.ops.channels import features_beside

_BROADCASTING = ARITHMETIC | {"where", "eq", "ne", "lt", "le", "gt", "ge"}
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
        """Return whether nothing is subtracted, so that the size cannot be negative."""
        return all(coefficient > 0 for _, coefficient in self.terms)

    def __add__(self, other: "Size | int") -> "Size":
        terms = Counter(dict(self.terms))
        for unknown, coefficient in _size(other).terms:
            terms[unknown] += coefficient
        return _of(terms)

    def __mul__(self, factor: int) -> "Size":
        return _of({unknown: coefficient * factor for unknown, coefficient in self.terms})


Sizes = tuple[Size, ...]


def _of(terms: Mapping[int, int]) -> Size:
    return Size(frozenset((unknown, coefficient) for unknown, coefficient in terms.items() if coefficient))


def _size(value: Size | int) -> Size:
    return value if isinstance(value, Size) else _of({_ONE: value})


class Unknowns:
    """The unknown sizes of one graph, and what layers require of them."""

    def __init__(self) -> None:
        self.required: dict[int, int] = {}  # numbers that layers require for unknown sizes
        self._numbers: dict[Hashable, int] = {_ONE: _ONE}  # by what defines an unknown size
        self._factors: dict[int, list[Size]] = {}  # factors of unknown sizes that are products

    def defined_by(self, what: Hashable) -> Size:
        """Return an unknown size, which is identified by its definition."""
        return _of({self._numbers.setdefault(what, len(self._numbers)): 1})

    def known(self, size: Size) -> Size:
        """Return the size with unknown sizes replaced by the numbers that layers require."""
        result = _size(0)
        for unknown, coefficient in size.terms:
            number = self.required.get(unknown)
            result += _of({unknown: coefficient}) if number is None else coefficient * number
        return result

    def require(self, size: Size, number: int) -> None:
        """Record that the size has to be this number."""
        terms = dict(size.terms)
        number -= terms.pop(_ONE, 0)
        if len(terms) == 1:
            ((unknown, coefficient),) = terms.items()
            if number % coefficient == 0:
                self.required[unknown] = number // coefficient

    def product(self, factors: Iterable[Size]) -> Size:
        """Return the product as an unknown size times a number; it does not depend on the order of the factors."""
        number, unknowns = self._factored(factors)
        if len(unknowns) < 2 or not number:
            return (unknowns[0] if unknowns else _size(1)) * number
        result = self.defined_by(("product", frozenset(Counter(unknowns).items())))
        ((unknown, _),) = result.terms
        self._factors[unknown] = unknowns
        return self.known(result * number)

    def quotient(self, factors: Iterable[Size], divisors: Iterable[Size]) -> Size | None:
        """Return the quotient of the two products if only numbers and equal sizes have to be cancelled, else None."""
        (number, rest), (divisor, cancelled) = self._factored(factors), self._factored(divisors)
        for size in cancelled:
            if size not in rest:
                return None
            rest.remove(size)
        whole = self.product([_size(number), *rest])
        if not divisor or any(coefficient % divisor for _, coefficient in whole.terms):
            return None
        return _of({unknown: coefficient // divisor for unknown, coefficient in whole.terms})

    def _factored(self, sizes: Iterable[Size]) -> tuple[int, list[Size]]:
        """Return the number and the other sizes, none of which is a product, that give the product of the sizes."""
        number, unknowns = 1, []
        for size in sizes:
            terms = list(size.terms)
            if len(terms) == 1:
                ((unknown, coefficient),) = terms
                number *= coefficient
                if unknown != _ONE:
                    unknowns += self._factors.get(unknown, [_of({unknown: 1})])
            else:
                unknowns.append(size)
        return number, unknowns

    def divided(self, size: Size, divisor: int) -> Size:
        """Return the quotient, rounded down."""
        whole, rest = {}, {}
        for unknown, coefficient in size.terms:
            whole[unknown], rest[unknown] = divmod(coefficient, divisor)
        remainder = _of(rest)
        if remainder.number is not None:
            return _of(whole)
        return _of(whole) + self.defined_by(("divided", remainder, divisor))

    def broadcast(self, one: Size, other: Size) -> Size:
        """Return the size that two sizes broadcast to."""
        if one == other or other.number == 1:
            return one
        if one.number == 1 or other.number is not None:  # a size that broadcasts with a number is 1 or that number
            return other
        return one if one.number is not None else self.defined_by(("common", frozenset([one, other])))

    def flat(self, sizes: Sizes, start: int, end: int) -> Sizes:
        """Return the sizes with the axes from ``start`` to ``end`` joined."""
        sizes = sizes or (_size(1),)
        start, end = start % len(sizes), end % len(sizes)
        return (*sizes[:start], self.product(sizes[start : end + 1]), *sizes[end + 1 :])

    def sliced(self, size: Size, place: slice) -> Size:
        """Return the size of a slice of an axis."""
        start, stop, step = place.start, place.stop, place.step
        if (start in (None, 0)) and stop is None and step in (None, 1):
            return size
        if any(isinstance(limit, fx.Node) for limit in (start, stop, step)):
            return self.defined_by(("slice", size, start, stop, step))
        if size.number is not None:
            return _size(len(range(*place.indices(size.number))))
        if start in (None, 0) and stop is None:  # as many as convolutions of this stride give
            return self.windows(size, 1, step, 1, 0)
        shorter = size + (-(start or 0) + (stop or 0))
        if step in (None, 1) and (start or 0) >= 0 >= (stop or 0) and stop != 0 and shorter.is_sum_of_sizes:
            return shorter
        return self.defined_by(("slice", size, start, stop, step))

    def windows(self, size: Size, kernel: int, stride: int, dilation: int, padding: int, ceil: bool = False) -> Size:
        """Return the number of positions of a window along an axis that is longer by ``padding``."""
        if ceil and stride > 1:
            return self.defined_by(("rounded up", size, kernel, stride, dilation, padding))
        return self.divided(size + (padding - dilation * (kernel - 1) - 1), stride) + 1


class Inference:
    """The sizes of all values in a graph whose nodes have the shapes of their results on an example in their meta.

    Args:
        graph: the graph.
        requirements: whether sizes that layers require hold in the whole graph.
    """

    def __init__(self, graph: fx.GraphModule, requirements: bool = True) -> None:
        self.unknowns, self._requirements = Unknowns(), requirements
        self.sizes: dict[fx.Node, Sizes] = {}  # of tensors
        self.integers: dict[fx.Node, Size | Sizes] = {}  # values of nodes that read sizes
        count = -1
        while count < len(self.unknowns.required):
            count = len(self.unknowns.required)
            for node in graph.graph.nodes:
                self._infer(node)

    def number(self, node: fx.Node, axis: int) -> int | None:
        """Return the size of an axis if it is the same for every input; None if not, or if there is no such axis."""
        sizes = self.sizes.get(node, ())
        return sizes[axis].number if 0 <= axis < len(sizes) else None

    def same(self, one: fx.Node, other: fx.Node) -> bool:
        """Return whether two tensors have the same shape for every input."""
        return self.sizes[one] == self.sizes[other]

    def _infer(self, node: fx.Node) -> None:
        shape = node.meta.get("shape")
        if shape is None:
            value = self._integer(node)
            if value is not None:
                self.integers[node] = value
            return
        sizes = self._rule(node)
        if sizes is None or len(sizes) != len(shape):
            sizes = tuple(self.unknowns.defined_by((node.name, axis)) for axis in range(len(shape)))
        self.sizes[node] = tuple(self.unknowns.known(size) for size in sizes)
        for axis, number in _required(_unhooked(node)).items() if node.args and self._requirements else ():
            source = self.sizes.get(node.args[0], ())  # type: ignore[arg-type]
            if -len(source) <= axis < len(source):
                self.unknowns.require(source[axis], number)

    def _integer(self, node: fx.Node) -> Size | Sizes | None:
        """Return the sizes, or the number computed from sizes, that the node reads."""
        first = node.args[0] if node.args else None
        sizes = self.sizes.get(first) if isinstance(first, fx.Node) else None
        if node.op == "call_method" and sizes is not None:
            if node.target == "size":
                return _picked(sizes, node.args[1]) if len(node.args) > 1 else sizes
            return _size(len(sizes)) if node.target == "dim" else None
        if node.target is getattr and sizes is not None:
            if node.args[1] == "ndim":
                return _size(len(sizes))
            return sizes if node.args[1] == "shape" else None
        values: list[Any] = [self.integers.get(arg, arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
        if node.target is length and isinstance(values[0], tuple):
            return _size(len(values[0]))
        if node.target is operator.getitem and isinstance(values[0], tuple):
            return _picked(values[0], node.args[1])
        if len(values) != 2 or not all(isinstance(value, Size | int) for value in values):
            return None
        if node.target is operator.add:
            return _size(values[0]) + values[1]
        if node.target is operator.sub:
            return _size(values[0]) + _size(values[1]) * -1
        if node.target is operator.mul:
            return self.unknowns.product([_size(values[0]), _size(values[1])])
        if node.target is operator.floordiv and isinstance(values[1], int) and values[1] > 0:
            return self.unknowns.divided(_size(values[0]), values[1])
        return None

    def _rule(self, node: fx.Node) -> Sizes | None:
        if node.op == "get_attr":
            return tuple(_size(length) for length in node.meta["shape"])
        name, module, first = operation(node), _unhooked(node), node.args[0] if node.args else None
        if node.op == "call_module" and (module is None or len(node.args) != 1 or node.kwargs):
            return None
        if name == "cat":
            return self._joined(first, argument(node, 1, "dim", 0))
        if name in _BROADCASTING:
            return self._of_arithmetic(node.args) if {"input", "other"}.isdisjoint(node.kwargs) else None
        if not isinstance(first, fx.Node):
            return None
        if first not in self.sizes:
            return self._part(first, node.args[1]) if name == "getitem" else None
        if name in _OF_CONSTANTS and len(node.all_input_nodes) > 1:  # the network computes the others
            return None
        call = _Call(node, module, self, self.sizes[first])
        if name in KEEPING_SHAPE:
            others = [x for x in node.all_input_nodes if x is not first and x in self.sizes]
            return None if name in ("clamp", "pow") and others else call.sizes
        if axes := axes_in_order(node):
            return tuple(call.sizes[axis] for axis in axes)
        if name in POOLS:
            return _pooled(call, name)
        if name in ADAPTIVE_POOLS:
            return _adapted(call, ADAPTIVE_POOLS[name])
        if name in REDUCTIONS:
            return _reduced(call, *REDUCTIONS[name])
        rule = _RULES.get(name) if module is None else _LAYER_RULES.get(name)
        return None if rule is None else rule(call)

    def _of_arithmetic(self, operands: Sequence[Any]) -> Sizes | None:
        """Return the sizes of the result of an operation on these tensors and numbers, which it broadcasts."""
        if any(isinstance(x, fx.Node) and x not in self.sizes and x not in self.integers for x in operands):
            return None
        tensors = [self.sizes[x] for x in operands if isinstance(x, fx.Node) and x in self.sizes]
        rank = max(map(len, tensors), default=0)
        whole = (_size(1),) * rank
        for sizes in tensors:
            whole = tuple(map(self.unknowns.broadcast, whole, whole[: rank - len(sizes)] + sizes))
        return whole

    def _joined(self, parts: Any, dim: Any) -> Sizes | None:
        if not isinstance(parts, list | tuple) or not parts or not isinstance(dim, int):
            return None
        if not all(isinstance(part, fx.Node) and part in self.sizes for part in parts):
            return None
        sizes = [self.sizes[part] for part in parts]
        rank = len(sizes[0])
        if any(len(each) != rank for each in sizes) or not -rank <= dim < rank:
            return None
        return _with_size(sizes[0], dim, sum((each[dim] for each in sizes), _size(0)))

    def _part(self, whole: fx.Node, place: Any) -> Sizes | None:
        """Return the sizes of one tensor of the tuple returned by split or chunk."""
        source = whole.args[0] if whole.args else None
        name = operation(whole)
        if name not in ("chunk", "split") or source not in self.sizes or len(whole.args) < 2:
            return None
        count, sizes = whole.args[1], self.sizes[source]  # type: ignore[index]
        dim = argument(whole, 2, "dim", 0)
        if len(whole.all_input_nodes) > 1 or not isinstance(dim, int) or not isinstance(place, int):
            return None
        number = sizes[dim].number
        if number is None:
            return None
        parts = getattr(torch, name)(torch.empty(number, device="meta"), count)
        return _with_size(sizes, dim, _size(len(parts[place])))


def _unhooked(node: fx.Node) -> Any:
    """Return the module that the node calls, if the module alone determines what the call does."""
    module = module_of(node)
    return None if module is None or has_forward_hooks(module) else module


@dataclass
class _Call:
    """A call of an operation on a tensor of these sizes; ``module`` is None for functions and methods."""

    node: fx.Node
    module: Any
    inference: Inference
    sizes: Sizes

    @property
    def unknowns(self) -> Unknowns:
        return self.inference.unknowns

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments after the tensor."""
        return self.node.args[1:]

    def option(self, place: int, name: str, default: Any = None) -> Any:
        """Return an attribute of the module, or an argument of the function, counted from behind the tensor."""
        if self.module is not None:
            return getattr(self.module, name, default)
        return argument(self.node, place + 1, name, default)


Rule = Callable[[_Call], Sizes | None]


def _with_size(sizes: Sizes, axis: int, size: Size) -> Sizes:
    result = list(sizes)
    result[axis] = size
    return tuple(result)


def _picked(sizes: Sizes, place: Any) -> Size | Sizes | None:
    if is_constant_slice(place):
        return sizes[place]
    return sizes[place] if isinstance(place, int) and -len(sizes) <= place < len(sizes) else None


def _convolved(call: _Call) -> Sizes:
    layer, axes = call.module, call.module.weight.dim() - 2
    options = zip(layer.kernel_size, layer.stride, layer.dilation, map(sum, paddings(layer)), strict=True)
    lengths = (call.unknowns.windows(size, *each) for size, each in zip(call.sizes[-axes:], options, strict=True))
    return (*call.sizes[: -axes - 1], _size(layer.out_channels), *lengths)


def _convolved_transposed(call: _Call) -> Sizes:
    layer, axes = call.module, call.module.weight.dim() - 2
    names = ("kernel_size", "stride", "dilation", "padding", "output_padding")
    options = zip(*(getattr(layer, name) for name in names), strict=True)
    lengths = (
        (size + -1) * stride + (dilation * (kernel - 1) + extra + 1 - 2 * padding)
        for size, (kernel, stride, dilation, padding, extra) in zip(call.sizes[-axes:], options, strict=True)
    )
    return (*call.sizes[: -axes - 1], _size(layer.out_channels), *lengths)


def _pooled(call: _Call, name: str) -> Sizes | None:
    axes, largest = POOLS[name], name.startswith("max")
    if call.option(5, "return_indices", False):
        return None
    if len(call.node.all_input_nodes) > 1:  # numbers that are computed, as that of all pixels
        return (*call.sizes[:-axes], *(call.unknowns.defined_by((call.node.name, axis)) for axis in range(axes)))
    kernel_size = call.option(0, "kernel_size")
    stride, padding = call.option(1, "stride") or kernel_size, call.option(2, "padding", 0)
    dilation = call.option(3, "dilation", 1) if largest else 1
    ceil = call.option(4 if largest else 3, "ceil_mode", False)
    options = zip(*(per_axis(option, axes) for option in (kernel_size, stride, dilation, padding)), strict=True)
    lengths = (
        call.unknowns.windows(size, k, s, d, 2 * p, ceil)
        for size, (k, s, d, p) in zip(call.sizes[-axes:], options, strict=True)
    )
    return (*call.sizes[:-axes], *lengths)


def _adapted(call: _Call, axes: int) -> Sizes:
    given = per_axis(call.option(0, "output_size"), axes)
    lengths = (old if new is None else _size(new) for old, new in zip(call.sizes[-axes:], given, strict=True))
    return (*call.sizes[:-axes], *lengths)


def _upsampled(call: _Call) -> Sizes:
    layer, sizes = call.module, call.sizes
    if layer.size is not None:
        return (*sizes[:2], *(_size(int(length)) for length in per_axis(layer.size, len(sizes) - 2)))
    lengths = (
        size * int(scale) if scale == int(scale) else call.unknowns.defined_by(("scaled", size, scale))
        for size, scale in zip(sizes[2:], per_axis(layer.scale_factor, len(sizes) - 2), strict=True)
    )
    return (*sizes[:2], *lengths)


def _of_items(call: _Call) -> Sizes | None:
    places = call.args[0] if isinstance(call.args[0], tuple) else (call.args[0],)
    if not all(isinstance(place, slice) or place is ... for place in places):
        return None
    if ... in places:
        before = places.index(...)
        gap = len(call.sizes) - len(places) + 1
        places = (*places[:before], *[slice(None)] * gap, *places[before + 1 :])
    rest = call.sizes[len(places) :]
    return (*map(call.unknowns.sliced, call.sizes, places), *rest)


def _padded(call: _Call) -> Sizes | None:
    pads = call.option(0, "pad")
    if not isinstance(pads, list | tuple) or not all(isinstance(p, int | fx.Node) for p in pads) or len(pads) % 2:
        return None
    result = list(call.sizes)
    for axis in range(len(pads) // 2):
        added: list[Any] = [call.inference.integers.get(pad, pad) for pad in pads[2 * axis : 2 * axis + 2]]
        known = all(isinstance(each, Size | int) for each in added)
        result[-1 - axis] = sum(added, result[-1 - axis]) if known else call.unknowns.defined_by((call.node.name, axis))
    return tuple(result)


def _interpolated(call: _Call) -> Sizes:
    lengths = (call.unknowns.defined_by((call.node.name, axis)) for axis in range(2, len(call.sizes)))
    return (*call.sizes[:2], *lengths)


def _reduced(call: _Call, place: int, place_of_keepdim: int) -> Sizes | None:
    gone = numbered_axes(call.option(place - 1, "dim"), len(call.sizes))
    keep = call.option(place_of_keepdim - 1, "keepdim", False)
    if gone is None:
        return None
    return tuple(_size(1) if axis in gone else size for axis, size in enumerate(call.sizes) if keep or axis not in gone)


def _gated(call: _Call) -> Sizes:
    axis = call.option(0, "dim", -1)
    return _with_size(call.sizes, axis, call.unknowns.divided(call.sizes[axis], 2))


def _pixels_shuffled(call: _Call) -> Sizes:
    factor = call.option(0, "upscale_factor")
    *before, channels, height, width = call.sizes
    return (*before, call.unknowns.divided(channels, factor**2), height * factor, width * factor)


def _pixels_unshuffled(call: _Call) -> Sizes:
    factor = call.option(0, "downscale_factor")
    *before, channels, height, width = call.sizes
    return (*before, channels * factor**2, call.unknowns.divided(height, factor), call.unknowns.divided(width, factor))


def _unsqueezed(call: _Call) -> Sizes:
    place = call.option(0, "dim") % (len(call.sizes) + 1)
    return (*call.sizes[:place], _size(1), *call.sizes[place:])


def _squeezed(call: _Call) -> Sizes | None:
    asked = numbered_axes(call.option(0, "dim"), len(call.sizes))
    if asked is None or any(call.sizes[axis].number is None for axis in asked):
        return None
    return tuple(size for axis, size in enumerate(call.sizes) if axis not in asked or size.number != 1)


def _flattened(call: _Call) -> Sizes:
    return call.unknowns.flat(call.sizes, call.option(0, "start_dim", 0), call.option(1, "end_dim", -1))


def unchanged_axes(old: Sizes, new: Sizes) -> tuple[int, int]:
    """Return how many axes a view leaves alone at the beginning and, of the others, at the end.

    A view has the numbers in the same order, so that any axes of equal sizes are the same.
    """
    before = _equal(old, new)
    return before, _equal(old[before:][::-1], new[before:][::-1])


def _equal(one: Sizes, other: Sizes) -> int:
    """Return at how many places from the first the sizes are equal."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def asked_sizes(args: tuple[Any, ...]) -> Sequence[Any]:
    """Return the sizes in the arguments of a view, which may be several arguments or one sequence."""
    return args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args


def _viewed(call: _Call) -> Sizes | None:
    return None if call.node.kwargs else _divided(call, call.sizes, asked_sizes(call.args))


def _divided(call: _Call, whole: Sizes, asked: Sequence[Any]) -> Sizes | None:
    """Return the sizes asked for, of which -1 is what is left of the product of others."""
    integers, unknowns = call.inference.integers, call.unknowns
    new: list[Any] = [integers.get(length) if isinstance(length, fx.Node) else length for length in asked]
    if len(new) == 1 and isinstance(new[0], tuple):  # the whole shape of another tensor
        return new[0]
    if not all(isinstance(length, Size | int) for length in new):
        return None
    lengths = [None if length == -1 else _size(length) for length in new]
    known = [length for length in lengths if length is not None]
    if len(known) == len(lengths):
        return tuple(known)
    rest = unknowns.quotient(whole, known) or unknowns.defined_by((call.node.name, "rest"))
    return tuple(rest if length is None else length for length in lengths)


def _unflattened(call: _Call) -> Sizes | None:
    axis = call.option(0, "dim")
    asked = call.option(1, "sizes" if call.module is None else "unflattened_size")
    if not isinstance(axis, int) or not isinstance(asked, list | tuple):
        return None
    axis %= len(call.sizes)
    parts = _divided(call, call.sizes[axis : axis + 1], asked)
    return None if parts is None else (*call.sizes[:axis], *parts, *call.sizes[axis + 1 :])


def _expanded(call: _Call) -> Sizes | None:
    asked = asked_sizes(call.args)
    added = len(asked) - len(call.sizes)
    new: list[Any] = [call.inference.integers.get(length, length) for length in asked]
    if call.node.kwargs or added < 0 or not all(isinstance(length, Size | int) for length in new):
        return None
    old = (*[_size(1)] * added, *call.sizes)
    return tuple(one if length == -1 else _size(length) for one, length in zip(old, new, strict=True))


def _of_taken_channels(call: _Call) -> Sizes | None:
    index = call.inference.sizes.get(call.args[0])
    return None if index is None else _with_size(call.sizes, call.option(1, "axis", 1), index[0])


def _of_layer_norm_with_constants(call: _Call) -> Sizes:
    _, _, variance, _ = call.args
    return _with_size(call.sizes, -1, call.sizes[-1] + features_beside(variance))


_RULES: dict[str, Rule] = {
    **{"getitem": _of_items, "pad": _padded, "flatten": _flattened},
    **{"interpolate": _interpolated, "glu": _gated},
    **{"pixelshuffle": _pixels_shuffled, "pixelunshuffle": _pixels_unshuffled},
    **{"unsqueeze": _unsqueezed, "squeeze": _squeezed, "view": _viewed, "unflatten": _unflattened},
    **{"expand": _expanded, "expandas": lambda call: call.inference.sizes.get(call.option(0, "other"))},
    "takechannels": _of_taken_channels,
    "layernormwithconstants": _of_layer_norm_with_constants,
}
_OF_CONSTANTS = {"glu", "pixelshuffle", "pixelunshuffle", "unsqueeze", "flatten", *ADAPTIVE_POOLS}
_LAYER_RULES: dict[str, Rule] = {
    **_RULES,
    "linear": lambda call: _with_size(call.sizes, -1, _size(call.module.out_features)),
    **{f"conv{axes}d": _convolved for axes in (1, 2, 3)},
    **{f"convtranspose{axes}d": _convolved_transposed for axes in (1, 2, 3)},
    "upsample": _upsampled,
}


def _required(layer: Any) -> dict[int, int]:
    """Return the input sizes that the layer requires, by axis."""
    kind = type(layer)
    if kind is nn.Linear:
        return {-1: layer.in_features}
    if kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
        return {1 - layer.weight.dim(): layer.in_channels}
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        return {1: layer.num_features} if layer.affine or layer.running_mean is not None else {}
    if kind is nn.GroupNorm:
        return {1: layer.num_channels} if layer.affine else {}
    if kind is nn.LayerNorm:
        return {axis - len(layer.normalized_shape): number for axis, number in enumerate(layer.normalized_shape)}
    if kind is nn.PReLU and layer.num_parameters > 1:
        return {1: layer.num_parameters}
    return {}
