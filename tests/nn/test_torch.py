"""Locally connected layers with torch's own tools: compiled, exported, copied, saved, replicated, half precision."""

import copy
import io
import pickle

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from loco_ext import optim
from loco_ext.nn import LocallyConnected1d, LocallyConnected2d, LocallyConnected3d
from tests.covering import slow
from tests.gpu import needs_gpu
from tests.processes import run_ranks
from tests.tolerances import same_bits

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WORLD = 2


def make_model(dtype=torch.float32):
    return nn.Sequential(
        LocallyConnected2d(2, 4, 3, padding=1, padding_mode="circular", input_size=(5, 6), dtype=dtype),
        nn.ReLU(),
        LocallyConnected2d(4, 6, 3, 2, groups=2, input_size=(5, 6), dtype=dtype),
    )


@pytest.mark.parametrize(
    ("memory_format", "compiler"),
    [
        (torch.contiguous_format, "aot_eager"),
        slow((torch.channels_last, "aot_eager")),
        slow((torch.contiguous_format, "inductor")),
    ],
    ids=str,
)
def test_a_training_step_compiles_into_one_graph_and_anew_after_growth(memory_format, compiler):
    model = make_model()
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    x = torch.randn(3, 2, 5, 6).contiguous(memory_format=memory_format)
    for radius in (0, 1):
        model[0].grow(radius)
        y, expected = compiled(x), model(x)
        torch.testing.assert_close(y, expected)
        assert y.stride() == expected.stride()
        gradients = [torch.autograd.grad(out.sin().sum(), list(model.parameters())) for out in (y, expected)]
        torch.testing.assert_close(*gradients)


def test_what_is_exported_and_loaded_computes_and_trains_as_it_did():
    model = nn.Sequential(nn.Conv2d(2, 2, 1), LocallyConnected2d(2, 4, 3, input_size=(5, 6)).grow(1), nn.Flatten())
    batch = {"input": {0: torch.export.Dim("batch", min=1)}}
    program, file = torch.export.export(model, (torch.randn(3, 2, 5, 6),), dynamic_shapes=batch), io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for size in (3, 5):
        x = torch.randn(size, 2, 5, 6)
        assert same_bits(loaded(x), model(x))
    for network in (model, loaded):
        network(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close({name: parameter.grad for name, parameter in loaded.named_parameters()}, expected)


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "pickle"]
)
def test_copies_are_the_same_and_apart(way):
    layer = make_model()[2].grow(1)
    other = way(layer)
    x = torch.randn(3, 4, 5, 6)
    y = layer(x)
    assert repr(other) == repr(layer)
    assert same_bits(other(x), y)
    other.grow(1)
    assert other.pattern.nnz > layer.pattern.nnz
    assert same_bits(layer(x), y)


def test_optimizers_know_the_blocks_of_a_weight_that_was_swapped():
    layers = [LocallyConnected2d(3, 3, 3, input_size=4) for _ in range(2)]
    torch.utils.swap_tensors(layers[0].weight, nn.Parameter(layers[1].weight.detach().clone()))
    for layer in layers:
        layer(torch.zeros(1, 3, 4, 4)).sum().backward()  # a gradient of zeros
        optim.SGD([layer.weight], lr=1.0, weight_decay=0.5, locality=(0.0, 1.0)).step()
    assert same_bits(layers[0].weight, layers[1].weight)


def test_checkpoints_of_safetensors_and_of_torch_distributed():
    layer = LocallyConnected1d(2, 3, 3, input_size=7).grow(1)
    saved, file = safetensors.torch.save(layer.state_dict()), io.BytesIO()
    torch.save(layer.state_dict(keep_vars=True), file)
    file.seek(0)
    for load in (
        lambda fresh: fresh.load_state_dict(torch.load(file, weights_only=True)),
        lambda fresh: fresh.load_state_dict(safetensors.torch.load(saved)),
        lambda fresh: set_model_state_dict(fresh, get_model_state_dict(layer)),
        lambda fresh: fresh.load_state_dict(copy.deepcopy(layer).state_dict(), assign=True),
    ):
        fresh = LocallyConnected1d(2, 3, 3, input_size=7)
        load(fresh)
        x = torch.randn(4, 2, 7)
        assert same_bits(fresh(x), layer(x))
        fresh.grow(1)
        assert fresh.pattern.nnz > layer.pattern.nnz


def test_the_former_name_of_the_weight_works():
    layer = LocallyConnected1d(2, 3, 3, input_size=7).grow(1)
    with pytest.warns(DeprecationWarning, match="the parameter is called weight"):
        assert layer.values is layer.weight
    replacement = nn.Parameter(torch.randn_like(layer.weight))
    with pytest.warns(DeprecationWarning, match="the parameter is called weight"):
        layer.values = replacement
    assert layer.weight is replacement
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]

    state = layer.state_dict()
    old_state = {"values" if name == "weight" else name: tensor for name, tensor in state.items()}
    fresh = nn.Sequential(LocallyConnected1d(2, 3, 3, input_size=7))
    fresh.load_state_dict({f"0.{name}": tensor for name, tensor in old_state.items()})
    old_pickle = copy.copy(layer)
    vars(old_pickle)["_parameters"] = {"values": layer.weight, "bias": layer.bias}
    vars(old_pickle)["pattern"] = vars(old_pickle).pop("_shared").pattern
    x = torch.randn(4, 2, 7)
    for other in (fresh, pickle.loads(pickle.dumps(old_pickle))):
        assert same_bits(other(x), layer(x))
        assert [name.removeprefix("0.") for name, _ in other.named_parameters()] == ["weight", "bias"]


def test_dtypes_and_devices_follow_the_module():
    layer = LocallyConnected3d(2, 3, 2, input_size=3).double()
    x = torch.randn(2, 2, 3, 3, 3, dtype=torch.float64)
    assert layer(x).dtype == torch.float64
    with torch.device("meta"):
        empty = LocallyConnected3d(2, 3, 2, input_size=3, dtype=torch.float64)
    assert empty.weight.is_meta
    there = x.to("meta")
    expected = empty(there)  # brings the pattern to the device, of whose type autocast knows nothing
    compiled = torch.compile(empty, fullgraph=True, backend="eager")
    assert compiled(there).shape == expected.shape == (2, 3, 2, 2, 2)
    empty.to_empty(device="cpu").load_state_dict(layer.state_dict())
    assert same_bits(empty(x), layer(x))
    assert nn.utils.skip_init(LocallyConnected3d, 2, 3, 2, input_size=3).weight.shape == layer.weight.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_and_half_precision(dtype):
    layer = LocallyConnected2d(2, 4, 3, input_size=(5, 6))
    x = torch.randn(3, 2, 5, 6)
    with torch.autocast("cpu", dtype):
        y = layer(x)
    half = copy.deepcopy(layer).to(dtype)
    assert same_bits(y, half(x.to(dtype)))
    y.sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    half.grow(1)
    assert half.deviation().delta_locality == 0


@needs_gpu
def test_layers_move_to_a_gpu_and_grow_there():
    layer = LocallyConnected2d(2, 4, 3, padding=1, input_size=(5, 6), dtype=torch.float64)
    x = torch.randn(3, 2, 5, 6, dtype=torch.float64)
    y = layer(x)
    moved = copy.deepcopy(layer).cuda()
    torch.testing.assert_close(moved(x.cuda()).cpu(), y)
    optimizer = optim.Adam(moved.parameters())
    moved(x.cuda()).square().sum().backward()
    optimizer.step()
    y = moved(x.cuda())
    assert same_bits(moved.grow(1, optimizer)(x.cuda()), y)
    torch.testing.assert_close(moved.deviation(), copy.deepcopy(moved).cpu().deviation())
    moved.prune(radius=0, optimizer=optimizer)
    torch.testing.assert_close(moved.to_dense()(x.cuda().flatten(1)).view(y.shape), y)
    assert moved.to_conv().weight.is_cuda
    layer.load_state_dict(moved.state_dict())
    torch.testing.assert_close(layer(x), y.cpu())


def train_model(model, optimizer, steps, rank=None):
    """Train on two images per step for one rank, or on those of all ranks if ``rank`` is None."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(WORLD, 2, 2, 5, 6, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        model(x.flatten(0, 1) if rank is None else x[rank]).square().mean().backward()
        optimizer.step()


def check_replicas(rank):
    runs = []
    for replicated in (True, False):
        torch.manual_seed(0)
        model = make_model(torch.float64)
        optimizer = optim.Adam(model.parameters(), 0.01)
        for steps in (range(2), range(2, 4)):
            wrapped = nn.parallel.DistributedDataParallel(model) if replicated else model
            train_model(wrapped, optimizer, steps, rank if replicated else None)
            model[2].grow(1, optimizer)
        runs.append([*model.parameters()])
    for ours, single in zip(*runs, strict=True):
        torch.testing.assert_close(ours, single)


@pytest.mark.slow
def test_replicas_train_as_one(tmp_path):
    run_ranks(check_replicas, count=WORLD, folder=tmp_path)
