"""Tests of what saving and loading refuse: one error names each cause, and nothing from a file is executed."""

import json
import math
import os
import shutil
from dataclasses import dataclass
from hashlib import sha256
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from loco_ext import sparsity
from tests.compaction.networks import graph_module, network


class Custom(nn.ReLU):
    pass


@dataclass
class Allowed:
    """A class that the process has allowed to load."""

    value: int


class Pair(NamedTuple):
    first: int
    second: int


def hooked():
    layer = nn.ReLU()
    layer.register_forward_hook(lambda *_: None)
    return layer


def changed(**attributes):
    layer = nn.Conv2d(3, 3, 3)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def calling(layer):
    return lambda: graph_module({"it": layer}, lambda graph, x: graph.call_module("it", (x,)))


def with_node(kind, target, *arguments):
    def build(graph, x):
        return getattr(graph, f"call_{kind}")(target, (x, *arguments))

    return lambda: graph_module({}, build)


def holding(tensor):
    return lambda: graph_module({"it": tensor}, lambda graph, x: graph.get_attr("it"))


def lost_attribute():
    model = graph_module({"it": torch.ones(1)}, lambda graph, x: graph.get_attr("it"))
    del model._buffers["it"]
    model.it = torch.ones(1)
    return model


REFUSED = {
    "a class of its own": (calling(Custom()), "module 'it': Custom is no layer"),
    "a layer that is in no table": (calling(nn.LSTM(2, 2)), "module 'it': LSTM is no layer"),
    "a parametrized layer": (
        calling(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))),
        "module 'it': ParametrizedLinear is no layer",
    ),
    "a hook": (calling(hooked()), "module 'it': attribute '_forward_hooks'"),
    "an attribute of its own": (calling(changed(note=Pair(1, 2))), "module 'it': attribute 'note'"),
    "a forward of its own": (calling(changed(forward=abs)), "module 'it': attribute 'forward'"),
    "an argument of no known type": (calling(changed(stride=torch.ones(2))), r"module 'it': tensor\(\[1., 1.\]\)"),
    "another shape": (calling(changed(weight=nn.Parameter(torch.ones(2, 3, 3, 3)))), "'it.weight': expected"),
    "paddings that differ": (
        calling(changed(padding_mode="circular", padding=(1, 2))),
        "module 'it': attribute '_reversed_padding_repeated_twice'",
    ),
    "a missing bias": (calling(changed(groups=3)), "tensor 'it.weight': expected"),
    "a module that runs nothing": (calling(nn.ModuleList()), "node 'it': call_module of 'it'"),
    "a lazy layer": (calling(nn.LazyLinear(2)), "module 'it': LazyLinear is no layer"),
    "a meta tensor": (calling(nn.Linear(2, 2, device="meta")), "tensor 'it.weight': expected a dense tensor with data"),
    "a sparse tensor": (holding(torch.eye(2).to_sparse()), "tensor 'it': expected a dense tensor"),
    "a dtype that safetensors lacks": (holding(torch.ones(2, dtype=torch.complex128)), "complex128"),
    "a tensor that is no buffer": (lost_attribute, "node 'it': get_attr of 'it'"),
    "a function": (with_node("function", torch.svd), "node 'svd': .*svd.* is no function"),
    "a lambda": (with_node("function", lambda x: x), "node '.*': .* is no function"),
    "a builtin": (with_node("function", eval), "node 'eval_1': .* is no function"),
    "an attribute that is not read": (with_node("function", getattr, "grad"), "node 'getattr_1': .*'grad'"),
    "a method": (with_node("method", "backward"), "node 'backward': call_method"),
    "an argument": (with_node("method", "add", 1j), "node 'add': 1j of type complex"),
    "a named tuple": (with_node("method", "add", Pair(1, 2)), r"node 'add': Pair\(first=1, second=2\) of type Pair"),
    "a graph of torch.export": (
        lambda: torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)).module(),
        "(module|model|node)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_not_be_loaded_is_not_saved(case, tmp_path):
    make, message = REFUSED[case]
    with pytest.raises(sparsity.ModelFileError, match=message):
        sparsity.save(make(), tmp_path / "folder")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((nn.ReLU(),), "model: expected a torch.fx.GraphModule, as of models that can be traced, got ReLU"),
        ((network("plain"), {"a": 1}), "report: expected None or an object with to_dict"),
        ((network("plain"), SimpleNamespace(to_dict=lambda: {"a": object()})), "report: expected plain data"),
    ],
)
def test_wrong_arguments_of_save_are_named(arguments, message, tmp_path):
    model, *report = arguments
    with pytest.raises(TypeError, match=message):
        sparsity.save(model, tmp_path / "folder", *report)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_missing_and_damaged_files_are_named(name, tmp_path):
    """Pipes and devices are not waited for."""
    sparsity.save(network("cropping"), tmp_path)
    path = tmp_path / name
    content = path.read_bytes()
    places = torch.randint(len(content), (20,), generator=torch.Generator().manual_seed(0)).tolist()
    damaged = [content[:n] for n in (0, 1, 7, len(content) // 2, len(content) - 3)]
    damaged += [b"x", b"[]", b"null", b"[" * 10**5, bytes(100), content[:-1] + b" x"]
    damaged += [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in places]
    for bad in damaged:
        path.write_bytes(bad)
        with pytest.raises(sparsity.ModelFileError, match=name):
            sparsity.load(tmp_path)
    path.unlink()
    for make, why in (
        (lambda: None, "No such file"),
        (lambda: os.mkfifo(path), "expected a regular file"),
        (lambda: path.symlink_to("/dev/zero"), "expected a regular file"),
        (path.mkdir, ""),
    ):
        path.unlink(missing_ok=True)
        make()
        with pytest.raises(sparsity.ModelFileError, match=f"{name}: cannot be read: {why}"):
            sparsity.load(tmp_path)


def forge(folder, change):
    """Change the content of a manifest and correct its checksum."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest["content"])
    manifest["sha256"] = sha256(json.dumps(manifest["content"]).encode()).hexdigest()
    path.write_text(json.dumps(manifest))


def node(content, op):
    return next(record for record in content["graph"] if record["op"] == op)


def module(content, kind):
    return next(record for record in content["modules"] if record.get("class") == kind)


_FUNCTIONS = (
    "os.system builtins.eval builtins.exec builtins.__import__ torch.load torch.hub.load torch.save "
    "torch.ops.load_library operator.attrgetter operator.methodcaller torch.nn.functional.os subprocess.run eval "
    "getattr torch.Tensor.numpy torch.nn.functional.__builtins__ torch.classes.load_library numpy.load"
)
_METHODS = "apply_ map_ register_hook backward __reduce_ex__ __class__ numpy tofile share_memory_ format"
BAD_FUNCTIONS, BAD_METHODS = _FUNCTIONS.split(), _METHODS.split()
BAD_NAMES = ["x): import os #", "x=print('run')", "x.y", "class", "", " x", "**args", 3, None, ["x"], "x\n"]
BAD_PATHS = ["norm\"); print('run'); (\"", "norm')", "a..b", "", ".", "__class__", "forward", "graph", 5, ["stem"]]
BAD_VALUES = [
    *({"node": "later"}, {"node": ["x"]}, {"dtype": "torch.load"}, {"dtype": []}, {"device": "print('run')"}),
    *({"code": "print('run')"}, {"tuple": 5}, {"slice": [1]}, {"float": "1e400"}, {"a": 1, "b": 2}, {}),
    {"dict": [[[], 1]]},
]
BAD_ATTRIBUTES = [
    "return_indices",
    "__deepcopy__",
    "forward",
    "__class__",
    "_forward_hooks",
    "weight",
    "a.b",
    "",
    "__call__",
]
BAD_CLASSES = ["Transformer", "os", "GraphModule", "DataParallel", "Module.__init__", "torch.nn.ReLU", None, []]


def chain(*steps):
    """Return a change that inserts function calls (name, arguments) after the input x; "a0" is the first result."""

    def change(content):
        def argument(value):
            if isinstance(value, str) and value[0] in "xa":
                return {"node": value}
            return {"tuple": [argument(entry) for entry in value]} if isinstance(value, tuple) else value

        calls = [
            {"name": f"a{i}", "op": "call_function", "target": target, "args": list(map(argument, args)), "kwargs": {}}
            for i, (target, *args) in enumerate(steps)
        ]
        content["graph"][1:1] = calls

    return change


HEIGHT = ("torch.Tensor.size", "x", 2)
SHAPE = ("builtins.getattr", "x", "shape")
TOO_LARGE = {
    "a huge power": chain(("operator.pow", 10, 10**9)),
    "a size's power": chain(HEIGHT, ("operator.pow", 2, "a0")),
    "an inverted number's power": chain(("operator.invert", 1), ("operator.pow", "a0", 40_000)),
    "powers in a row": chain(HEIGHT, *(("operator.pow", f"a{i}", 9) for i in range(9))),
    "products in a row": chain(HEIGHT, *(("operator.mul", f"a{i}", f"a{i}") for i in range(40))),
    "a product": chain(SHAPE, ("math.prod", "a0"), *(("math.prod", (f"a{i}", f"a{i}")) for i in range(1, 40))),
    "a long list": chain(("operator.mul", [0], 10**10)),
    "a long shape": chain(SHAPE, HEIGHT, ("operator.mul", "a0", "a1")),
    "sums of shapes": chain(SHAPE, *(("operator.add", f"a{i}", f"a{i}") for i in range(40))),
    "sums in place": chain(("operator.add", [0], [0]), *(("operator.iadd", "a0", "a0") for _ in range(40))),
    "many tensors": chain(("torch.split", "x", 1), ("operator.mul", "a0", 10**9)),
    "as many as a tensor says": chain(("torch.full", (), 10**9), ("operator.mul", [0], "a0")),
    "as many as a tensor of a sum says": chain(
        *(("torch.full", (), 10**9), ("operator.add", ("a0",), (1,)), ("operator.getitem", "a1", 0)),
        ("operator.mul", [0], "a2"),
    ),
    "as many as a tensor of a list says": chain(
        *(("torch.full", (), 10**9), ("operator.add", ("a0", 1), ()), ("operator.getitem", "a1", 0)),
        ("operator.mul", [0], "a2"),
    ),
    **{
        f"as many as the product of {what} says": chain(*steps, ("operator.mul", [0], f"a{len(steps) - 1}"))
        for what, *steps in (
            ("a tensor", ("torch.full", [2], 10**6), ("math.prod", "a0")),
            ("a tensor's entries", ("torch.full", [2], 10**6), ("torch.unbind", "a0"), ("math.prod", "a1")),
            ("a list of tensors", ("torch.full", (), 10**6), ("math.prod", ("a0", "a0"))),
        )
    },
    **{
        f"powers of {name}": chain((name, argument), *(("operator.pow", f"a{i}", 10**4) for i in range(2)))
        for name, argument in (("math.floor", 10**99), ("math.ceil", 1e300), ("loco_ext.length", "x"))
    },
    "truths of numbers": chain(
        *(("operator.eq", 0.5, 0.5), ("operator.mul", "a0", 10**99)),
        *(("operator.mul", f"a{i}", f"a{i}") for i in range(1, 40)),
    ),
    "many inputs": lambda c: (chain(("operator.mul", "x", 10**9))(c), node(c, "placeholder").update(target="*x")),
    "a pair of tensors": chain(("torch.max", "x", 1), ("operator.mul", "a0", 10**9)),
    "a pair of a pool": chain(("torch.nn.functional.max_pool2d_with_indices", "x", 2), ("operator.mul", "a0", 10**9)),
    "a pair of torch's pool": chain(("torch.adaptive_max_pool1d", "x", 2), ("operator.mul", "a0", 10**9)),
    "a wide number": chain(("operator.mod", "%999999999d", 1)),
    "lists in a list": chain(("operator.add", [[0]], []), ("operator.getitem", "a0", 0), ("operator.mul", "a1", 9**9)),
    "an item of a list": chain(("operator.getitem", ["%999999999d"], 0)),
    "a product that starts with a list": lambda c: c["graph"].insert(
        1,
        {"name": "a", "op": "call_function", "target": "math.prod", "args": [[9**9]], "kwargs": {"start": [0]}},
    ),
    "a method of a text": lambda c: node(c, "call_method").update(target="split", args=["a b"]),
}

FORGERIES = {
    **TOO_LARGE,
    "modules in a circle": lambda c: c["modules"].extend(
        {"name": name, **({"same_as": same} if same else {"class": "Module", "arguments": {}})}
        for name, same in (("one", ""), ("two", ""), ("one.inner", "two"), ("two.inner", "one"))
    ),
    "more ways to modules than names": lambda c: c["modules"].extend(
        {"name": name, **({"same_as": same} if same else {"class": "Module", "arguments": {}})}
        for i in range(40)
        for name, same in ((f"m{i}", ""), *(((f"m{i}.{way}", f"m{i - 1}") for way in "ab") if i else ()))
    ),
    **{
        f"{what} {bad!r}": lambda c, bad=bad, place=place: place(c, bad)
        for what, every, place in (
            ("function", BAD_FUNCTIONS, lambda c, bad: node(c, "call_function").update(target=bad)),
            ("method", BAD_METHODS, lambda c, bad: node(c, "call_method").update(target=bad)),
            ("input", BAD_NAMES, lambda c, bad: node(c, "placeholder").update(target=bad)),
            ("node", BAD_NAMES, lambda c, bad: node(c, "call_function").update(name=bad)),
            ("keyword", BAD_NAMES[:3], lambda c, bad: node(c, "call_function").update(kwargs={bad: 1})),
            ("module", BAD_PATHS, lambda c, bad: node(c, "call_module").update(target=bad)),
            ("attribute", BAD_PATHS, lambda c, bad: node(c, "get_attr").update(target=bad)),
            ("layer at", BAD_PATHS, lambda c, bad: module(c, "BatchNorm2d").update(name=bad)),
            ("tensor at", BAD_PATHS, lambda c, bad: c["tensors"][0].update(name=bad)),
            ("value", BAD_VALUES, lambda c, bad: node(c, "call_method").update(args=[bad])),
            ("own", BAD_ATTRIBUTES, lambda c, bad: module(c, "BatchNorm2d").update(attributes={bad: 1})),
            ("class", BAD_CLASSES, lambda c, bad: module(c, "BatchNorm2d").update({"class": bad})),
        )
        for bad in every
    },
    **{
        f"getattr of {name!r}": lambda c, name=name: node(c, "call_function").update(
            target="builtins.getattr", args=[{"node": "x"}, name]
        )
        for name in ("__class__", "shape); print('run'")
    },
    "getattr by keyword": lambda c: node(c, "call_function").update(target="builtins.getattr", args=[], kwargs={}),
    "an unknown operation": lambda c: node(c, "call_function").update(op="call_code"),
    "a device for a constructor": lambda c: module(c, "Conv2d")["arguments"].update(device={"device": "cpu"}),
    "an unknown argument": lambda c: module(c, "Conv2d")["arguments"].update(hook="eval"),
    "a wrong argument": lambda c: module(c, "Conv2d")["arguments"].update(in_channels="many"),
    "a huge layer": lambda c: module(c, "Linear")["arguments"].update(out_features=2**50),
    "an unknown shared module": lambda c: module(c, "Conv2d").update(same_as="nothing"),
    "a module inside itself": lambda c: module(c, "Conv2d").update(same_as=""),
    "a missing tensor": lambda c: c["tensors"].pop(),
    "a tensor that is not stored": lambda c: c["tensors"].append(c["tensors"][0] | {"name": "more"}),
    "a parameter as a buffer": lambda c: c["tensors"][-1].update(kind="buffer", persistent=True),
    "a missing layer": lambda c: c["modules"].pop(0),
    "no output": lambda c: c["graph"].pop(),
    "two outputs": lambda c: c["graph"].append(c["graph"][-1] | {"name": "again"}),
    "an empty graph": lambda c: c["graph"].clear(),
    "no graph": lambda c: c.pop("graph"),
    "a dataclass that is in use": lambda c: chain((f"{__name__}.Allowed", 9**9), ("operator.mul", [0], "a0"))(c),
    "attributes that are no names": lambda c: module(c, "Conv2d").update(attributes=["note"]),
    "an attribute that is no value": lambda c: module(c, "Conv2d").update(attributes={"note": {"code": "eval"}}),
    "a graph of words": lambda c: c.update(graph="print('run')"),
}


@pytest.fixture(scope="module")
def residual(tmp_path_factory):
    folder = tmp_path_factory.mktemp("residual")
    sparsity.save(network("residual"), folder)
    return folder


@pytest.mark.parametrize("case", FORGERIES)
def test_a_forged_manifest_is_refused_and_nothing_runs(case, residual, tmp_path, monkeypatch, capfd):
    shutil.copytree(residual, tmp_path, dirs_exist_ok=True)
    forge(tmp_path, FORGERIES[case])
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("ran"))
    allowed = torch.serialization.safe_globals([Allowed, os.system])
    with allowed, pytest.raises(sparsity.ModelFileError, match=r"manifest.json: ") as error:
        sparsity.load(tmp_path)
    assert "\n" not in str(error.value).replace(case, "")
    assert capfd.readouterr().out == ""


def test_the_arithmetic_of_networks_is_loaded(tmp_path):
    """Models compute with sizes, including values that look like sequences but are not."""

    def forward(x):
        h, w = x.shape[2:]
        pooled = torch.nn.functional.max_pool2d(x, 2, return_indices=True)[0]
        total = math.prod(x.shape[1:]) ** 2 + h * w // 2 - 1
        flat = (x - x.max()) / x.amax() * x.max()
        flat = flat * flat.max() * 1000000000 - torch.nn.functional.max_pool2d(flat, 1) * 1000000000
        flat = torch.relu(torch.max(flat, flat * 100000) + total**0.5).view(x.shape[:2] + x.shape[2:3] + x.shape[3:])
        return flat, pooled.repeat([1] * (x.dim() - 2) + [2, h % 3 + 1]), x.split(1)[0] * 2

    model = torch.fx.symbolic_trace(forward)
    sparsity.save(model, tmp_path)
    x = torch.randn(2, 3, 4, 6)
    for ours, theirs in zip(sparsity.load(tmp_path)(x), model(x), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("old", ["stem", "places"])
def test_names_that_are_code_are_refused_where_both_files_agree(old, tmp_path):
    sparsity.save(network("residual"), tmp_path)
    path, new = tmp_path / "model.safetensors", f'{old}"); print("run"); ("'
    save_file({name.replace(old, new): value for name, value in load_file(path).items()}, path)

    def renamed(part):
        return json.loads(json.dumps(part).replace(f'"{old}', f'"{json.dumps(new)[1:-1]}'))

    def rename(content):
        content |= {part: renamed(content[part]) for part in ("modules", "tensors")}
        for record in content["graph"]:
            record["target"] = renamed(record["target"])
        content["tensors_sha256"] = sha256(path.read_bytes()).hexdigest()

    forge(tmp_path, rename)
    with pytest.raises(sparsity.ModelFileError, match="expected a name of letters, digits, '_' and '-'"):
        sparsity.load(tmp_path)


def test_the_two_files_name_the_same_tensors(tmp_path):
    sparsity.save(network("residual"), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)

    def check(message):
        save_file(tensors, path)
        forge(tmp_path, lambda content: content.update(tensors_sha256=sha256(path.read_bytes()).hexdigest()))
        with pytest.raises(sparsity.ModelFileError, match=message):
            sparsity.load(tmp_path)

    tensors["more"] = torch.ones(1)
    check("does not know the tensor 'more'")
    del tensors["more"], tensors["head.bias"]
    check(r"head\.bias")
    forge(tmp_path, lambda content: content["tensors"].pop())
    check(r"tensor 'head\.bias' is missing")


def test_other_formats_and_versions_are_named(tmp_path):
    sparsity.save(network("plain"), tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    for change, message in (({"format": "onnx"}, "of the format 'onnx'"), ({"version": 2}, "of version 2, this")):
        path.write_text(json.dumps(manifest | change))
        with pytest.raises(sparsity.ModelFileError, match=message):
            sparsity.load(tmp_path)
