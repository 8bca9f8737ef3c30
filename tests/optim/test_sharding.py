"""Tests of sharded and replicated training: DTensor, FSDP2, distributed checkpoints and DDP match one process."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import loco_ext
from loco_ext import optim, sparsity
from loco_ext.nn import LocallyConnected2d
from tests.covering import covering
from tests.optim.stepping import (
    CLASSES,
    LOCALITY,
    RICH,
    assert_same,
    clones,
    make_params,
    nearly,
    params_of,
    set_gradients,
    train,
)
from tests.processes import run_ranks
from tests.tolerances import same_bits

WORLD = 2
STEPS = 4


def sharded(params, mesh, placement):
    return [nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [placement])) for p in params]


def local(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_in_full(ours, other, equal=same_bits):
    """Assert that two optimizers hold equal full parameters and states, sharded or not."""
    assert_same(ours, other, equal=lambda a, b: equal(local(a), local(b)))


def set_sharded_gradients(params, plain, mesh, placement=None):
    """Copy the plain parameters' gradients, distributed by ``placement`` or as the parameters are."""
    for p, q in zip(params, plain, strict=True):
        if not isinstance(p, DTensor):
            p.grad = q.grad.clone()
        elif isinstance(placement, Partial):
            p.grad = DTensor.from_local(q.grad / mesh.size(), mesh, [placement])
        else:
            p.grad = distribute_tensor(q.grad.clone(), mesh, [placement] if placement else p.placements)


SHAPES = [(5, 2, 3, 3), (1, 3, 5, 5), (7,), (4, 6)]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("path", [{}, {"fused": False}, {"foreach": True}], ids=str)
def test_dtensors_are_stepped_as_plain_tensors_and_beside_some(mesh, name, path):
    placements = [Shard(0), Replicate(), Shard(1), Shard(-3), None]
    start = make_params([(5, 2, 3, 3), (1, 3, 5, 5), (4, 2, 3, 3), (4, 2, 3, 3), (7,)])
    pairs = zip(start, placements, strict=True)
    params = [(clones([p]) if placement is None else sharded([p], mesh, placement))[0] for p, placement in pairs]
    plain, ours = (getattr(optim, name)(each, **RICH[name], **path, locality=LOCALITY) for each in (start, params))
    for step in range(3):
        set_gradients(start, step)
        set_sharded_gradients(params, start, mesh)
        plain.step()
        ours.step()
    assert_same_in_full(ours, plain)
    for p in params[:-1]:
        for key, value in ours.state[p].items():
            assert key == "step" or (isinstance(value, DTensor) and value.placements == p.placements)


@pytest.mark.parametrize("name", CLASSES)
def test_blocks_may_be_sharded_along_channels_alone(mesh, name):
    plain, shards = (LocallyConnected2d(2, 3, 3, input_size=5, bias=False) for _ in range(2))
    shards.load_state_dict(plain.state_dict())
    set_gradients([plain.weight], 0)
    for placement in (Shard(0), _StridedShard(0, split_factor=1), Shard(-1)):
        (shards.weight,) = sharded([plain.weight], mesh, placement)
        ours = getattr(optim, name)(optim.parameter_groups(shards, 0.1, LOCALITY), lr=0.1)
        set_sharded_gradients([shards.weight], [plain.weight], mesh)
        if placement.dim == 0:
            with pytest.raises(NotImplementedError, match=r"expected sharding along channels .* got _?S"):
                ours.step()
    other = getattr(optim, name)(optim.parameter_groups(plain, 0.1, LOCALITY), lr=0.1)
    other.step()
    ours.step()
    assert_same_in_full(ours, other)


@pytest.mark.parametrize("option", [{"locality": LOCALITY}, {"penalty": sparsity.RingPenalty(0.5)}], ids=str)
def test_fully_sharded_blocks_are_not_taken_for_kernels(mesh, option):
    """As kernels, their channels would be taps, along which they are not sharded."""
    layer = fully_shard(LocallyConnected2d(3, 5, 3, input_size=5), mesh=mesh)
    ours = optim.SGD(layer.parameters(), lr=0.1, weight_decay=0.1, **option)
    layer(torch.ones(1, 3, 5, 5)).sum().backward()
    with pytest.raises(NotImplementedError, match=r"expected (sharding along channels|no sharding) .* got S\(0\)"):
        ours.step()


RINGS, JOINT = sparsity.RingPenalty(0.5), sparsity.KernelPenalty(0.5, power=2)


@pytest.mark.parametrize(
    ("name", "options", "placement", "wanted"),
    [
        ("SGD", {"locality": LOCALITY}, Shard(2), "sharding along channels"),
        ("Adam", {"locality": LOCALITY}, Shard(3), "sharding along channels"),
        ("AdamW", {"locality": LOCALITY}, Shard(-2), "sharding along channels"),
        ("SGD", {"penalty": RINGS}, Replicate(), None),
        ("Adam", {"penalty": RINGS}, Shard(0), None),
        ("SGD", {"penalty": RINGS}, Shard(1), "sharding along output channels"),
        ("SGD", {"penalty": JOINT}, Replicate(), None),
        ("SGD", {"penalty": JOINT}, Shard(0), "no sharding"),
    ],
    ids=str,
)
def test_maps_and_penalties_want_whole_kernels_or_nothing_is_written(mesh, name, options, placement, wanted):
    """The plain parameter comes first, so it would be the first to be written."""
    before = make_params([(2, 2, 3, 3), (3, 2, 3, 3)])
    params = [*clones(before[:1]), *sharded(before[1:], mesh, placement)]
    ours, plain = (getattr(optim, name)(each, **{**RICH[name], **options}) for each in (params, before))
    set_gradients(before, 0)
    set_sharded_gradients(params, before, mesh)
    if wanted is None:
        plain.step()
        ours.step()
    else:
        with pytest.raises(NotImplementedError, match=rf"expected {wanted} .* got S"):
            ours.step()
    assert_same_in_full(ours, plain)


def test_torchs_own_path_refuses_penalties_of_sharded_parameters_before_the_step(mesh):
    (before,) = make_params([(3, 2, 3, 3)])
    (param,) = sharded([before], mesh, Shard(0))
    ours = optim.SGD([param], lr=0.1, foreach=True, penalty=RINGS)
    param.grad = torch.ones_like(param)
    with pytest.raises(NotImplementedError, match="penalty: expected foreach=False or None for DTensor parameters"):
        ours.step()
    assert torch.equal(local(param.detach()), before.detach())


@pytest.mark.parametrize("which", ["weight", "norm"])
def test_a_folded_penalty_refuses_sharded_parameters(mesh, which):
    (before,) = make_params([(5, 2, 3, 3)])
    norm = nn.BatchNorm2d(5)
    (param,) = sharded([before], mesh, Replicate()) if which == "weight" else [before]
    if which == "norm":
        (norm.weight,) = sharded([norm.weight], mesh, Replicate())
    penalty = [sparsity.FoldedPenalty(sparsity.RingPenalty(0.5), norm)]
    ours = optim.SGD([{"params": [param], "penalty": penalty}, {"params": [norm.weight]}], lr=0.1)
    param.grad = torch.ones_like(param)
    with pytest.raises(NotImplementedError, match="penalty: expected no sharding, ordinary parameters"):
        ours.step()
    assert torch.equal(local(param.detach()), before.detach())


def make_model():
    """Return layers of 5 and 1 output channels: two ranks split neither evenly, and one has none of the second."""
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 1, 5, padding=2), nn.Flatten(), nn.Linear(36, 3)
    return nn.Sequential(*layers).double()


def make_optimizer(name, model):
    return getattr(optim, name)(optim.parameter_groups(model, 0.1, LOCALITY), **{**RICH[name], "lr": 0.02})


def train_model(model, optimizer, steps, rank=None, start=0):
    """Train each rank on its share of the same batches; the mean of their gradients is that of the whole batch."""
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 2, 6, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (8,), generator=generator)
        mine = slice(None) if rank is None else slice(rank, None, WORLD)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()


def single_run(name, steps=STEPS):
    model = make_model()
    optimizer = make_optimizer(name, model)
    train_model(model, optimizer, steps)
    return model, optimizer


def shard_model(model):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def check_checkpoint(rank, name):
    """Two ranks save in full what one process would; a fresh sharded model that loads it continues equally."""
    model = shard_model(make_model())
    optimizer = make_optimizer(name, model)
    train_model(model, optimizer, 2, rank)
    full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=False))
    parts = get_optimizer_state_dict(model, optimizer)
    for saved, options in ((full, StateDictOptions(full_state_dict=True)), (parts, StateDictOptions())):
        other = shard_model(make_model())
        other.load_state_dict(copy.deepcopy(model.state_dict()))
        resumed = make_optimizer(name, other)
        set_optimizer_state_dict(other, resumed, copy.deepcopy(saved), options=options)
        assert [group["locality"] for group in resumed.param_groups] == [[LOCALITY, LOCALITY], None, None]
        assert_same_in_full(resumed, optimizer)
        train_model(other, resumed, STEPS - 2, rank, start=2)
        assert_same_in_full(resumed, single_run(name)[1], nearly)
    if rank == 0:
        single_model, single = single_run(name, 2)
        for key, state in get_optimizer_state_dict(single_model, single)["state"].items():
            assert all(nearly(full["state"][key][k], value) for k, value in state.items())


def check_ddp(rank, name):
    model = make_model()
    optimizer = make_optimizer(name, model)
    train_model(nn.parallel.DistributedDataParallel(model), optimizer, STEPS, rank)
    assert_same(optimizer, single_run(name)[1], nearly)


def check_gradients(rank, name):
    """Gradients laid out in another way are brought to their parameters' placement."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for placement in (Replicate(), Partial(), Shard(0)):
        plain = getattr(optim, name)(make_params(SHAPES), **RICH[name], locality=LOCALITY)
        params = sharded(params_of(plain), mesh, Shard(0))
        ours = getattr(optim, name)(params, **RICH[name], locality=LOCALITY)
        set_gradients(params_of(plain), 0)
        set_sharded_gradients(params, params_of(plain), mesh, placement)
        plain.step()
        ours.step()
        assert_same_in_full(ours, plain)


def check_classes(rank, check):
    with loco_ext.backend("native"):
        for name in CLASSES:
            check(rank, name)


@pytest.mark.parametrize(
    ("locality", "full"), covering([LOCALITY, [LOCALITY], (0.5, 1.0, 2.0), [None]], [True, False], strength=1), ids=str
)
def test_a_distributed_checkpoint_brings_locality_back(mesh, locality, full):
    """Saving in full uses containers that do not preserve tuples."""
    options = StateDictOptions(full_state_dict=full)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False)).double()
    saved = optim.AdamW(model.parameters(), locality=locality)
    train(saved, 1)
    model.zero_grad()
    loaded = optim.AdamW(model.parameters(), locality=locality)
    checkpoint = get_optimizer_state_dict(model, saved, options=options)
    set_optimizer_state_dict(model, loaded, checkpoint, options=options)
    assert loaded.param_groups[0]["locality"] == locality
    train(loaded, 1)


@pytest.mark.slow
@pytest.mark.parametrize("check", [check_checkpoint, check_ddp, check_gradients])
def test_two_processes_train_as_one(check, tmp_path):
    run_ranks(check_classes, check, count=WORLD, folder=tmp_path)


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("name", CLASSES)
def test_an_optimizer_that_sorts_its_parameters_takes_one_group_for_each_layer(name):
    model, factors = make_model(), {"0": (0.5, 2.0), "2": (0.25, 1.0)}
    penalties = {"0": sparsity.RingPenalty(0.5), "2": sparsity.KernelPenalty(0.5)}
    convolutions, *others = optim.parameter_groups(model, 0.1, penalty=penalties, per_layer=factors)
    entries = zip(*(convolutions[key] for key in ("params", "locality", "penalty")), strict=True)
    alone = [{**convolutions, "params": [p], "locality": local, "penalty": own} for p, local, own in entries]
    options = {**RICH[name], "lr": 0.02}
    train_model(model, ZeroRedundancyOptimizer([*alone, *others], getattr(optim, name), **options), STEPS)
    other = make_model()
    groups = optim.parameter_groups(other, 0.1, penalty=penalties, per_layer=factors)
    train_model(other, getattr(optim, name)(groups, **options), STEPS)
    assert all(map(nearly, model.parameters(), other.parameters()))


@pytest.mark.parametrize("name", CLASSES)
def test_a_world_of_one_trains_and_resumes_fully_sharded_as_unsharded(mesh, name):
    model = shard_model(make_model())
    optimizer = make_optimizer(name, model)
    train_model(model, optimizer, 2)
    resumed = make_optimizer(name, model)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_in_full(resumed, optimizer)
    train_model(model, resumed, STEPS - 2, start=2)
    assert_same_in_full(resumed, single_run(name)[1], nearly)
