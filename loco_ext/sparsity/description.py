"""Conversion of a torch.fx.GraphModule to plain data and tensors, and back; see :mod:`loco_ext.sparsity.files`."""

import dataclasses
import inspect
import keyword
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice, zip_longest
from typing import Any

import torch
from torch import Tensor, fx, nn

from loco_ext.ops.memory_format import FORMATS, is_channels_last
from loco_ext.sparsity.arithmetic import check_arithmetic
from loco_ext.sparsity.vocabulary import (
    ATTRIBUTES,
    CONTAINERS,
    FUNCTION_NAMES,
    FUNCTIONS,
    GETATTR,
    LAYERS,
    METHODS,
    ModelFileError,
    decode,
    encode,
)

# fx writes targets into the source code of forward, so they are restricted to these characters.
_PATH = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
# The former are saved apart from the constructor's arguments. The latter is derived from them and only read for other
# padding modes than "zeros".
_KEPT_APART = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"}
_UNREAD_FOR_ZEROS = {"_reversed_padding_repeated_twice"}
_ARGUMENTS = {name for layer in LAYERS.values() for name in inspect.signature(layer).parameters}


def describe(model: fx.GraphModule) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what :func:`rebuild` creates the model from: plain data that JSON can hold, and tensors by name.

    Raises:
        ModelFileError: a node, module or tensor, which the message names, cannot be rebuilt.
    """
    modules: list[dict[str, Any]] = []
    tensors: list[dict[str, Any]] = []
    values: dict[str, Tensor] = {}
    names: dict[int, str] = {}  # names of modules and tensors seen, by id
    for path, module in model.named_modules(remove_duplicate=False):
        shared = names.setdefault(id(module), path)
        if shared != path:
            modules.append({"name": path, "same_as": shared})
            continue
        if module is not model:
            modules.append({"name": path, **_layer_record(path, module), "training": module.training})
        for name, kind, tensor in _tensors_of(module):
            full = f"{path}.{name}" if path else name
            first = names.setdefault(id(tensor), full)
            record: dict[str, Any] = {"name": full, "kind": kind}
            if kind == "buffer":
                record["persistent"] = name not in module._non_persistent_buffers_set
            if first == full:
                record |= _tensor_record(full, tensor)
                values[full] = tensor
            else:
                record["same_as"] = first
            tensors.append(record)
    classes = {found: name for name, found in result_classes(model).items()}
    if type(model.graph._codegen) is not fx.graph.CodeGen:
        raise ModelFileError("model: its graph has a code generator of its own, as those of torch.export have")
    graph = [_node_record(node, classes) for node in model.graph.nodes]
    return {"training": model.training, "graph": graph, "modules": modules, "tensors": tensors}, values


def result_classes(model: fx.GraphModule) -> dict[str, type]:
    """Return the dataclasses that the graph makes instances of, such as the results of transformers' networks."""
    return named_classes(node.target for node in model.graph.nodes if node.op == "call_function")


def named_classes(candidates: Iterable[Any]) -> dict[str, type]:
    """Return those of the candidates that are dataclasses, by module and name."""
    candidates = (each[0] if isinstance(each, tuple) else each for each in candidates)
    classes = (found for found in candidates if isinstance(found, type) and dataclasses.is_dataclass(found))
    return {f"{found.__module__}.{found.__qualname__}": found for found in classes}


def rebuild(
    description: Mapping[str, Any], values: Mapping[str, Tensor], classes: Mapping[str, type]
) -> fx.GraphModule:
    """Return the model given to :func:`describe`, with copies of ``values``.

    Creates only layers of the tables and, in its graph, instances of ``classes``, which have names as of
    :func:`named_classes`.

    Raises:
        ModelFileError: a name is in no table, or parts do not fit together.
    """
    model = fx.GraphModule(nn.Module(), fx.Graph())
    model.training = bool(description["training"])
    modules: dict[str, nn.Module] = {"": model}
    for record in description["modules"]:
        name = record["name"]
        _check_path("module", name)
        modules[name] = modules[record["same_as"]] if "same_as" in record else _layer(name, record)
        parent, _, last = name.rpartition(".")
        modules[parent].add_module(last, modules[name])
    _check_names(model, [record["name"] for record in description["modules"]])
    tensors: dict[str, Tensor] = {}
    for record in description["tensors"]:
        name = record["name"]
        _check_path("tensor", name)
        tensors[name] = tensors[record["same_as"]] if "same_as" in record else _tensor(record, values[name])
        _register(modules, record, tensors[name])
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise ModelFileError(f"tensor {name!r} is missing")
    model.graph = _graph(description["graph"], modules, tensors, classes)
    model.graph.lint()
    check_arithmetic(model)
    return model


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for kind, found in (("parameter", module._parameters), ("buffer", module._buffers)):
        yield from ((name, kind, tensor) for name, tensor in found.items() if tensor is not None)


def _layer_record(path: str, module: nn.Module) -> dict[str, Any]:
    _check_path("module", path)
    kind = type(module).__name__
    known = CONTAINERS | LAYERS
    if type(module) is not known.get(kind):
        raise ModelFileError(f"module {path!r}: {type(module).__qualname__} is no layer that can be saved")
    try:
        arguments = {name: encode(value) for name, value in _arguments(module).items()} if kind in LAYERS else {}
    except ModelFileError as error:
        raise ModelFileError(f"module {path!r}: {error}") from error
    record = {"class": kind, "arguments": arguments}
    if added := _added_attributes(module, _layer(path, record)):
        record["attributes"] = added
    _check_rebuilt(path, module, _layer(path, record))
    return record


def _added_attributes(module: nn.Module, rebuilt: nn.Module) -> dict[str, Any]:
    """Return the module's attributes that its class does not define, as other packages set them, if plain values."""
    added = {}
    for name in sorted(vars(module).keys() - vars(rebuilt).keys()):
        with suppress(ModelFileError):
            _check_added(rebuilt, name)
            added[name] = encode(vars(module)[name])
    return added


def _check_added(layer: nn.Module, name: Any) -> None:
    """Raise ModelFileError unless neither Python, nor torch, nor this package reads the attribute of such a layer."""
    known = isinstance(name, str) and (name.startswith("__") or name in _ARGUMENTS or hasattr(layer, name))
    if known or not (isinstance(name, str) and name.isidentifier()):
        raise ModelFileError(f"{type(layer).__name__} takes no attribute {name!r}")


def _arguments(layer: nn.Module) -> dict[str, Any]:
    """Return the arguments of the layer's constructor that differ from its defaults."""
    found = {}
    for name, parameter in inspect.signature(type(layer)).parameters.items():
        if name in ("device", "dtype") or not hasattr(layer, name):
            continue
        value = getattr(layer, name)
        if name == "bias":  # without a weight, there is no bias either
            value = value is not None or layer.weight is None
        if type(value) is not type(parameter.default) or value != parameter.default:
            found[name] = value
    return found


def _check_rebuilt(path: str, module: nn.Module, rebuilt: nn.Module) -> None:
    """Raise ModelFileError unless both have the same attributes, which include hooks, apart from tensors."""
    apart = _KEPT_APART
    if getattr(module, "padding_mode", None) == "zeros":
        apart = apart | _UNREAD_FOR_ZEROS
    mine, theirs = vars(module), vars(rebuilt)
    for name in sorted((mine.keys() | theirs.keys()) - apart):
        if name not in mine or name not in theirs or mine[name] != theirs[name]:
            raise ModelFileError(f"module {path!r}: attribute {name!r} would not be what it is in a loaded model")


def _tensor_record(name: str, tensor: Tensor) -> dict[str, Any]:
    _check_path("tensor", name)
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        raise ModelFileError(f"tensor {name!r}: expected a dense tensor with data, got {type(tensor).__qualname__}")
    record: dict[str, Any] = {"requires_grad": tensor.requires_grad}
    if is_channels_last(tensor):
        record["memory_format"] = encode(FORMATS[tensor.ndim])
    return record


def _node_record(node: fx.Node, classes: Mapping[Any, str]) -> dict[str, Any]:
    target = node.target
    if node.op == "call_function":
        try:
            target = classes.get(target) or FUNCTION_NAMES[target]  # type: ignore[index]
        except (KeyError, TypeError):
            raise ModelFileError(f"node {node.name!r}: {target} is no function that can be saved") from None
    try:
        args, kwargs = encode(list(node.args)), {name: encode(value) for name, value in node.kwargs.items()}
    except ModelFileError as error:
        raise ModelFileError(f"node {node.name!r}: {error}") from error
    return {"name": node.name, "op": node.op, "target": target, "args": args, "kwargs": kwargs}


def _check_path(what: str, name: Any) -> None:
    if not (isinstance(name, str) and _PATH.fullmatch(name)):
        raise ModelFileError(f"{what} {name!r}: expected a name of letters, digits, '_' and '-'")


def _check_names(model: nn.Module, names: list[str]) -> None:
    """Raise ModelFileError unless the paths to modules are exactly these names, which also rules out cycles."""
    found = islice(model.named_modules(remove_duplicate=False), 1, len(names) + 2)
    for (name, _), expected in zip_longest(found, names, fillvalue=("", None)):
        if name != expected:
            raise ModelFileError(f"module {name or expected!r}: is not where the list of modules has it")


def _layer(name: str, record: Mapping[str, Any]) -> nn.Module:
    """Return a layer of the tables, on the meta device."""
    kind = record["class"]
    if kind in CONTAINERS:
        layer: nn.Module = CONTAINERS[kind]()
    elif kind in LAYERS:
        arguments = {name: decode(value, {}) for name, value in record["arguments"].items()}
        unknown = arguments.keys() - (inspect.signature(LAYERS[kind]).parameters.keys() - {"device", "dtype"})
        if unknown:
            raise ModelFileError(f"module {name!r}: {kind} takes no argument {min(unknown)!r}")
        with torch.device("meta"):
            layer = LAYERS[kind](**arguments)
    else:
        raise ModelFileError(f"module {name!r}: {kind!r} is no layer that can be loaded")
    layer.training = bool(record.get("training", True))
    for attribute, value in record.get("attributes", {}).items():
        _check_added(layer, attribute)
        setattr(layer, attribute, decode(value, {}))
    return layer


def _tensor(record: Mapping[str, Any], value: Tensor) -> Tensor:
    memory_format = decode(record["memory_format"], {}) if "memory_format" in record else torch.contiguous_format
    tensor = torch.empty(value.shape, dtype=value.dtype, device=value.device, memory_format=memory_format)
    tensor.copy_(value)
    if record["kind"] == "parameter":
        return nn.Parameter(tensor, requires_grad=bool(record["requires_grad"]))
    return tensor.requires_grad_(bool(record["requires_grad"]))


def _register(modules: Mapping[str, nn.Module], record: Mapping[str, Any], tensor: Tensor) -> None:
    parent, _, name = record["name"].rpartition(".")
    module, is_parameter = modules[parent], record["kind"] == "parameter"
    if type(module).__name__ in LAYERS:
        expected = (module._parameters if is_parameter else module._buffers).get(name)
        if expected is None or expected.shape != tensor.shape:
            shape = "none" if expected is None else tuple(expected.shape)
            raise ModelFileError(f"tensor {record['name']!r}: expected {shape}, got {tuple(tensor.shape)}")
    if is_parameter:
        module.register_parameter(name, tensor)  # type: ignore[arg-type]
    else:
        module.register_buffer(name, tensor, persistent=bool(record["persistent"]))


def _graph(
    records: list[Mapping[str, Any]],
    modules: Mapping[str, nn.Module],
    tensors: Mapping[str, Tensor],
    classes: Mapping[str, type],
) -> fx.Graph:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for record in records:
        name = record["name"]
        for word in (name, *record["kwargs"]):
            _check_word(name, word)
        try:
            args = tuple(decode(value, nodes) for value in record["args"])
            kwargs = {key: decode(value, nodes) for key, value in record["kwargs"].items()}
            target = _target(record["op"], record["target"], args, modules, tensors, classes)
        except ModelFileError as error:
            raise ModelFileError(f"node {name!r}: {error}") from error
        nodes[name] = graph.create_node(record["op"], target, args, kwargs, name)
    if [record["op"] for record in records].count("output") != 1 or records[-1]["op"] != "output":
        raise ModelFileError("the graph does not end with its one output")
    return graph


def _check_word(name: str, word: Any) -> None:
    if not (isinstance(word, str) and word.isidentifier() and not keyword.iskeyword(word)):
        raise ModelFileError(f"node {name!r}: {word!r} is no name")


def _target(
    op: str,
    target: Any,
    args: tuple[Any, ...],
    modules: Mapping[str, nn.Module],
    tensors: Mapping[str, Tensor],
    classes: Mapping[str, type],
) -> Any:
    """Return the target that the node calls or names, from the tables or the model."""
    if op == "placeholder":
        # *inputs stands for any number of arguments
        _check_word(target, target.removeprefix("*") if isinstance(target, str) else target)
        return target
    if op == "output" and target == "output":
        return target
    if op == "get_attr" and target in tensors:
        return target
    if op == "call_module" and type(modules.get(target)).__name__ in (*LAYERS, "Sequential"):
        return target
    if op == "call_method" and target in METHODS and args and isinstance(args[0], fx.Node):
        return target
    if op == "call_function" and target in FUNCTIONS:
        if target == GETATTR and not (len(args) == 2 and args[1] in ATTRIBUTES):
            raise ModelFileError(f"{args[1:]} is no attribute that may be read")
        return FUNCTIONS[target]
    if op == "call_function" and target in classes:
        return classes[target]
    hint = "; if it is a dataclass that you trust, see torch.serialization.add_safe_globals"
    raise ModelFileError(
        f"{op} of {target!r} is nothing that a saved graph may hold{hint if op == 'call_function' else ''}"
    )
