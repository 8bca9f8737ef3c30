"""Tests of saving and loading networks: the same bits in any process, and nothing from the files is executed."""

import contextlib
import inspect
import json
import math
import operator
import os
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import fx, nn

from loco_ext import sparsity
from loco_ext.sparsity.vocabulary import FUNCTIONS, LAYERS, decode, encode
from tests.compaction.networks import NETWORKS, graph_module, images, network
from tests.processes import SERVER

ROOT = Path(__file__).parents[2]
FILES = {"manifest.json", "model.safetensors"}


def same_bytes(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and raw(a) == raw(b)


def raw(tensor):
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8)) if tensor.numel() else b""


def code(model):
    """Return the source of forward without its signature, whose annotations may differ."""
    return re.sub(r"def forward\(self, x.*\n", "", model.code)


def assert_same_model(loaded, model):
    """Assert that code, tensors (types, flags and order) and layers (flags included) are the same."""
    assert code(loaded) == code(model)
    for tensors in ("named_parameters", "named_buffers"):
        mine, theirs = (list(getattr(m, tensors)(remove_duplicate=False)) for m in (loaded, model))
        assert [name for name, _ in mine] == [name for name, _ in theirs]
        for (_, a), (_, b) in zip(mine, theirs, strict=True):
            assert same_bytes(a, b)
            assert (type(a), a.requires_grad) == (type(b), b.requires_grad)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    mine, theirs = (list(m.named_modules(remove_duplicate=False))[1:] for m in (loaded, model))
    assert [(n, type(m), m.training, m.extra_repr()) for n, m in mine] == [
        (n, type(m), m.training, m.extra_repr()) for n, m in theirs
    ]
    assert loaded.training == model.training


def round_trip(model, folder):
    sparsity.save(model, folder)
    return sparsity.load(folder)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_loaded_network_is_the_same_to_the_last_bit(name, tmp_path):
    model = network(name)
    loaded = round_trip(model, tmp_path / "new" / "folder")
    assert set(os.listdir(tmp_path / "new" / "folder")) == FILES
    assert_same_model(loaded, model)
    for x in (images(), images(5).to(memory_format=torch.channels_last)):
        assert torch.equal(loaded(x), model(x))


def test_a_loaded_network_compiles(tmp_path):
    loaded = round_trip(network("residual"), tmp_path)
    x = images()
    assert torch.equal(torch.compile(loaded, backend="eager", fullgraph=True)(x), loaded(x))
    torch.testing.assert_close(torch.compile(loaded, backend="aot_eager", fullgraph=True)(x), loaded(x))


@pytest.mark.slow
def test_a_clean_process_loads_the_same_network(tmp_path):
    model, x = network("residual"), images()
    sparsity.save(model, tmp_path)
    save_file({"x": x, "y": model(x).detach()}, tmp_path / "io.safetensors")
    program = (
        "import torch; from safetensors.torch import load_file; from loco_ext import sparsity; "
        f"torch.set_num_threads({torch.get_num_threads()}); io = load_file('io.safetensors'); "
        "print(torch.equal(sparsity.load('.')(io['x']), io['y']))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "True\n", done.stderr


DTYPES = [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64]


def test_unusual_numbers_dtypes_shapes_and_layouts_keep_their_bits(tmp_path):
    bits = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 0x7F800000, 1], dtype=torch.int32)
    grid = torch.randn(4, 6)
    tensors = {
        "nan": bits.view(torch.float32),
        "scalar": torch.tensor(3),
        "none": torch.empty(0, 4),
        "rows": grid[1:3],
        "images": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "grey": torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
        "points": torch.randn(2, 3, 1, 1).to(memory_format=torch.channels_last),
        "volumes": torch.randn(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d),
        "columns": grid.T,
        "expanded": torch.randn(3, 1).expand(3, 4),
    }
    for dtype in DTYPES:
        values = torch.randint(0, 2 if dtype == torch.bool else 256, (3, 16), dtype=torch.uint8)
        tensors[str(dtype).replace(".", "_")] = values.view(dtype)
    loaded = round_trip(graph_module(tensors, lambda graph, x: [x, *map(graph.get_attr, tensors)]), tmp_path)
    for name, expected in tensors.items():
        if name in ("columns", "expanded"):
            assert raw(getattr(loaded, name)) == raw(expected)
        else:
            assert same_bytes(getattr(loaded, name), expected)


def test_what_is_shared_stays_shared_and_is_stored_once(tmp_path):
    conv = nn.Conv2d(3, 3, 3, padding=1)
    twin = nn.Conv2d(3, 3, 3, padding=1)
    twin.weight = conv.weight
    layers = {"a": conv, "b": nn.Sequential(OrderedDict(inner=conv, twin=twin)), "c": conv, "w": conv.weight}

    def build(graph, x):
        for name in ("a", "b", "b.inner", "c"):
            x = graph.call_module(name, (x,))
        return graph.call_function(torch.mul, (x, graph.call_method("sum", (graph.get_attr("w"),))))

    model = graph_module(layers, build)
    loaded = round_trip(model, tmp_path)
    assert_same_model(loaded, model)
    assert loaded.a is loaded.b.inner is loaded.c
    assert loaded.a.weight is loaded.b.twin.weight is loaded.w
    assert sorted(load_file(tmp_path / "model.safetensors")) == ["a.bias", "b.twin.bias", "w"]
    x = images()
    assert torch.equal(loaded(x), model(x))


def test_flags_and_the_report_are_kept(tmp_path):
    model = network("residual").train()
    model.norm.eval()
    model.stem.weight.requires_grad_(False)
    model.register_buffer("places", model.places, persistent=False)
    report = SimpleNamespace(to_dict=lambda: {"sizes": (3, 2), "ratio": math.nan, "layers": [{"name": "stem"}]})
    sparsity.save(model, tmp_path, report)
    loaded = sparsity.load(tmp_path)
    assert_same_model(loaded, model)
    assert loaded.meta["report"] == {"sizes": [3, 2], "ratio": None, "layers": [{"name": "stem"}]}
    assert json.loads((tmp_path / "manifest.json").read_text(), parse_constant=pytest.fail)


def test_plain_attributes_that_others_have_set_are_kept(tmp_path):
    model = network("residual")
    notes = {"_is_initialized": True, "scales": [(1.5, math.inf), None], "note": "print('x')"}
    for module in (model.stem, model.norm):
        vars(module).update(notes)
    for loaded in (first := round_trip(model, tmp_path / "a"), round_trip(first, tmp_path / "b")):
        assert_same_model(loaded, model)
        for module in (loaded.stem, loaded.norm):
            assert {name: vars(module)[name] for name in notes} == notes


def test_values_of_every_kind_are_kept():
    node = fx.Graph().placeholder("x")
    plain = [None, True, 0, -(2**70), 1.0, -0.0, 1e-320, "a'\"\n\u00e9\ud800", math.inf, -math.inf, torch.bfloat16]
    plain += [torch.device("cuda", 1), torch.channels_last, ..., slice(None, 3, node), (), [], {}, node]
    value = [*plain, tuple(plain), {"a": (plain, {1: [(2,)]}), (1, "b"): None}]
    text = json.dumps(encode(value), allow_nan=False)
    back = decode(json.loads(text), {"x": node})
    assert back == value
    assert repr(back) == repr(value)
    assert math.isnan(decode(encode(math.nan), {}))
    assert type(decode(encode(torch.Size([2, 3])), {})) is tuple
    immutable = encode(fx.immutable_collections.immutable_list([1])), encode(fx.immutable_collections.immutable_dict())
    assert (immutable[0], decode(immutable[1], {})) == ([1], {})


NEEDED = {
    **dict.fromkeys(("in_channels", "out_channels", "num_features", "num_channels", "embedding_dim", "value"), 4),
    **dict.fromkeys(("kernel_size", "num_embeddings", "in_features", "in1_features", "normalized_shape", "size"), 3),
    **dict.fromkeys(("out_features", "in2_features", "num_groups", "norm_type", "groups", "output_size"), 2),
    **dict.fromkeys(("padding", "dim", "threshold", "upscale_factor", "downscale_factor"), 1),
    "unflattened_size": (2, 2),
}
OTHERS = {bool: [True, False], int: [2], float: [0.3, 7.0], type(None): [2, True]}
OTHERS[str] = ["same", "reflect", "tanh", "bilinear"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_layer_is_made_again_with_every_argument(tmp_path):
    layers = {}
    for name, layer in LAYERS.items():
        parameters = [p for p in inspect.signature(layer).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
        needed = {p.name: NEEDED[p.name] for p in parameters if p.default is p.empty}
        layers[f"{name}_plain"] = layer(**needed)
        for parameter in parameters:
            if parameter.name in needed or parameter.name in ("device", "dtype") or parameter.name.startswith("_"):
                continue
            for i, value in enumerate(OTHERS[type(parameter.default)]):
                with contextlib.suppress(ValueError, TypeError, AssertionError, RuntimeError):
                    layers[f"{name}_{parameter.name}{i}"] = layer(**needed, **{parameter.name: value})
    assert len(layers) > 3 * len(LAYERS)
    layers["changed"] = nn.Conv2d(3, 3, 3)
    layers["changed"].padding = (2, 0)
    model = graph_module(layers, lambda graph, x: [graph.call_module(name, (x,)) for name in layers])
    assert_same_model(round_trip(model, tmp_path), model)


def test_every_function_is_found_again(tmp_path):
    def build(graph, x):
        others = {"builtins.getattr": "shape"}
        return [graph.call_function(function, (x, others.get(name, math.inf))) for name, function in FUNCTIONS.items()]

    model = graph_module({}, build)
    loaded = round_trip(model, tmp_path)
    assert [node.target for node in loaded.graph.nodes if node.op == "call_function"] == list(FUNCTIONS.values())
    assert loaded.code == model.code


def test_an_inverted_mask_is_kept(tmp_path):
    """EdgeNeXt makes its positions of one."""

    class Inverted(nn.Module):
        def forward(self, x):
            return x * ~(x > 0)

    x = images()
    assert torch.equal(round_trip(fx.symbolic_trace(Inverted()), tmp_path)(x), Inverted()(x))


def test_a_network_of_any_number_of_arguments_is_kept(tmp_path):
    class Product(nn.Module):
        def forward(self, *inputs):
            return torch.bmm(inputs[0], inputs[1])

    model, pair = Product(), torch.randn(2, 3, 4, 4)
    assert torch.equal(round_trip(fx.symbolic_trace(model), tmp_path)(*pair), model(*pair))


def test_load_names_a_wrong_device_and_files_of_two_saves(tmp_path):
    for name in "ab":
        sparsity.save(network("plain"), tmp_path / name)
    assert all(p.device.type == "cpu" for p in sparsity.load(tmp_path / "b", torch.device("cpu")).parameters())
    with pytest.raises(ValueError, match="device: expected one that torch can use here, got 'nowhere'"):
        sparsity.load(tmp_path / "b", "nowhere")
    (tmp_path / "a" / "model.safetensors").replace(tmp_path / "b" / "model.safetensors")
    with pytest.raises(sparsity.ModelFileError, match=r"b/manifest.json: does not belong to the model.safetensors"):
        sparsity.load(tmp_path / "b")


def save_and_die(source, folder, count):
    """Save a network anew; end the process instead of changing files more than ``count`` times."""
    model, left = sparsity.load(source), iter(range(count))

    def dying(function):
        def call(*arguments, **options):
            if next(left, None) is None:
                os._exit(9)
            return function(*arguments, **options)

        return call

    for name in ("replace", "write_text", "write_bytes", "mkdir"):
        setattr(Path, name, dying(getattr(Path, name)))
    sparsity.save(model, folder)


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_one_network_or_none_that_loads(tmp_path):
    old, new = network("plain"), network("residual")
    sparsity.save(new, tmp_path / "new")
    for count in range(2, 6):
        folder = tmp_path / str(count)
        sparsity.save(old, folder)
        process = SERVER.Process(target=save_and_die, args=(tmp_path / "new", folder, count))
        process.start()
        process.join()
        assert process.exitcode == (9 if count < 5 else 0)
        if count == 4:  # killed between the two files
            with pytest.raises(sparsity.ModelFileError, match=r"does not belong to the model.safetensors beside it"):
                sparsity.load(folder)
            sparsity.save(old, folder)
        assert_same_model(sparsity.load(folder), new if count == 5 else old)


def test_a_save_that_fails_leaves_the_old_files(tmp_path, monkeypatch):
    old = network("plain")
    sparsity.save(old, tmp_path)

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space left"):
        sparsity.save(network("residual"), tmp_path)
    assert set(os.listdir(tmp_path)) == FILES
    assert_same_model(sparsity.load(tmp_path), old)


def test_constants_and_text_in_a_graph_are_data(tmp_path):
    """Text goes into the source code that fx writes; it must stay text."""
    texts = ["'); print('run'); ('", '"""', "\\", "{x}", "x", "\n", "#"]

    def build(graph, x):
        picked = graph.call_function(operator.getitem, (x, (slice(None, -1), ..., None)))
        return {"x": picked, "texts": [*texts, {text: text for text in texts}], "numbers": (math.inf, -math.inf, 1e-9)}

    model = graph_module({}, build)
    x = images()
    a, b = round_trip(model, tmp_path)(x), model(x)
    assert torch.equal(a.pop("x"), b.pop("x"))
    assert a == b
    assert a["texts"][:-1] == texts
