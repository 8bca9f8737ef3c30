"""The CUDA kernels that end a step with a prox, executed on the CPU through the operators.

These tests check what the tests of penalties, which run the same kernels too, do not see."""

import pytest
import torch
from torch import nn

import loco_ext
from loco_ext import geometry, ops, optim, sparsity
from tests.covering import covering
from tests.cuda_on_cpu import operators
from tests.optim.stepping import train
from tests.optim_step.cases import FLOATS, Case, assert_same, make_case
from tests.optim_step.layouts import LAYOUTS
from tests.optim_step.maps import LOCO_2D
from tests.tolerances import assert_within_ulps

CLASSES = {"SGD": {"momentum": 0.9}, "Adam": {}, "AdamW": {"amsgrad": True}}


def without_threshold() -> ops.StepPenalty:
    rings = geometry.ring_index((3, 3)).flatten().tolist()
    return ops.StepPenalty(rings, torch.zeros(max(rings) + 1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("rule", "dtype", "layout"),
    covering(["sgd", "adam"], FLOATS, ["contiguous", "channels_last"], strength=1),
    ids=str,
)
@pytest.mark.usefixtures("cuda_on_cpu")
def test_a_prox_that_changes_nothing_leaves_every_bit_of_the_step(rule, dtype, layout):
    options = {"maps": [LOCO_2D], "map_index": [0, -1], "grad_scale": torch.tensor(2.0), "seed": 7, "rounding_step": 3}
    case = make_case(rule, [(6, 5, 3, 3), (3, 33, 3, 3)], dtypes=[dtype] * 3, ordinals=[4, 9], **options)
    case = case.laid_out(params=LAYOUTS[layout])
    penalised: Case = case.copy(penalties=[without_threshold()] * 2)
    assert_same(penalised.step(), case.copy().step())


def test_blocks_share_slots_where_kernels_are_too_large_to_stay_on_chip(monkeypatch, compiled):
    """There are more kernels than slots; in Adam each kernel needs 41 KB."""
    results = []
    for use in (lambda: None, lambda: operators.use(monkeypatch, compiled)):
        use()
        generator = torch.Generator().manual_seed(0)
        param = nn.Parameter(torch.randn(306, 321, 8, dtype=torch.float64, generator=generator))
        param.grad = torch.randn(param.shape, dtype=torch.float64, generator=generator)
        with loco_ext.backend("native"):
            optim.Adam([param], lr=0.02, penalty=sparsity.RingPenalty(2.0)).step()
        results.append(param.detach())
    expected, actual = results
    assert_within_ulps(actual, expected, ulps=2**12, scale=expected.abs().max().item())
    assert torch.equal(actual == 0, expected == 0)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.usefixtures("cuda_on_cpu")
def test_many_small_parameters_are_few_launches(compiled, name):
    """Penalised parameters of one width are stepped in one launch, and all other parameters in another."""
    shapes = [(4, channels, 3, 3) for channels in range(1, 41)] + [(4,)] * 40
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = getattr(optim, name)(params, lr=0.01, penalty=sparsity.RingPenalty(0.1), **CLASSES[name])
    train(optimizer, 2)
    library = operators.library(compiled)
    before = library.launches()
    optimizer.step()
    table, counts = 1, name != "SGD"
    assert library.launches() - before == table + counts + 1 + 1


@pytest.mark.parametrize(("name", "norm"), [("SGD", "linf"), ("Adam", "l2"), ("AdamW", "linf")])
@pytest.mark.usefixtures("cuda_on_cpu")
def test_layers_whose_filters_shrink_together_share_a_launch(compiled, name, norm):
    library, launches = operators.library(compiled), []
    for layers in (1, 3):
        params = [nn.Parameter(torch.randn(6, 5, 3, 3)) for _ in range(layers)]
        penalty = sparsity.KernelPenalty(0.1, norm=norm, power=2)
        optimizer = getattr(optim, name)(params, lr=0.01, penalty=penalty, **CLASSES[name])
        train(optimizer, 2)
        before = library.launches()
        optimizer.step()
        launches.append(library.launches() - before)
    assert launches[0] == launches[1]
