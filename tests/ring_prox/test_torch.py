"""Tests of how the ring operators work with torch: opcheck and torch.compile."""

import pytest
import torch
from torch import nn

from loco_ext import ops, sparsity
from tests.covering import covering, label, slow
from tests.ring_prox.cases import FLOATS, MODES, Rings, make_case
from tests.tolerances import assert_within_ulps, same_bits

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "native"),
    pytest.mark.parametrize("native", ["cpu"], indirect=True),
]
RINGS = Rings((3, 3), "half", "auto")
METRIC = torch.rand(4, 3, 3, 3) + 0.5


@pytest.mark.parametrize(
    ("mode", "dtype", "layout"),
    covering(MODES, FLOATS, [torch.contiguous_format, torch.channels_last], strength=1),
    ids=label,
)
@pytest.mark.slow
def test_the_prox_passes_opcheck(mode, dtype, layout):
    case = make_case(RINGS, 4, **mode).to(dtype)
    weight = case.weight.contiguous(memory_format=layout)
    arguments = (weight, RINGS.of_taps, case.thresholds, case.squared, case.metric, case.norm == "linf")
    results = torch.library.opcheck(torch.ops.loco_ext.ring_prox.default, arguments)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_norms_pass_opcheck(dtype):
    weight = torch.randn(4, 3, 3, 3).to(dtype)
    results = torch.library.opcheck(torch.ops.loco_ext.ring_norms.default, (weight, RINGS.of_taps, 3))
    assert set(results.values()) == {"SUCCESS"}


COMPILED = {
    "ring_prox": lambda w: sparsity.ring_prox(w, torch.tensor([0.5, 0.1, 0.2], dtype=torch.float64)),
    "ring_prox_metric": lambda w: sparsity.ring_prox(w * 2, [0.5, 0.1, 0.2], metric=METRIC * 2) + 1,
    "kernel_sizes": lambda w: sparsity.kernel_sizes(sparsity.ring_prox(w, [0.9, 0.1], "full", "linf")),
    "kkt_residual": lambda w: sparsity.kkt_residual(w, w / 2, [0.5, 0.1, 0.2]),
    "ring_penalty": lambda w: sparsity.RingPenalty(0.1, "full", "scaled", "linf", 2).value(w),
    "ring_penalty_prox": lambda w: sparsity.RingPenalty(0.1, weighting="scaled").prox(w, 0.5),
    "kernel_penalty": lambda w: sparsity.KernelPenalty(0.1, power=2).value(w) + sparsity.ring_norms(w).square().sum(),
    "kernel_penalty_prox": lambda w: sparsity.KernelPenalty(0.1).prox(w, 0.5),
}
SOME = ("ring_prox_metric", "kkt_residual", "kernel_penalty")


@pytest.mark.parametrize(
    ("name", "compiler"),
    [
        *((name, "aot_eager") for name in SOME),
        *(slow((name, "inductor")) for name in SOME),
        *(slow((name, "aot_eager")) for name in COMPILED if name not in SOME),
    ],
)
def test_functions_compile_into_one_graph(name, compiler):
    function = COMPILED[name]
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    expected, found = function(weight), torch.compile(function, fullgraph=True, backend=compiler)(weight)
    torch.testing.assert_close(found, expected)
    if compiler == "aot_eager":
        assert same_bits(found, expected) if expected.is_floating_point() else torch.equal(found, expected)
    if expected.requires_grad:
        gradients = [torch.autograd.grad(value.sum(), weight)[0] for value in (expected, found)]
        assert torch.count_nonzero(gradients[0]) > 0
        torch.testing.assert_close(*gradients)
        if compiler == "aot_eager":
            assert_within_ulps(gradients[1], gradients[0])


def test_norms_that_are_exported_and_traced_have_their_gradients():
    rings = RINGS.of_taps

    class Norms(nn.Module):
        def forward(self, weight):
            return ops.ring_norms(weight, rings, 3).square().sum(1)

    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    exported, traced = torch.export.export(Norms(), (weight,)).module(), torch.jit.trace(Norms(), (weight,))
    for function in (exported, traced):
        (gradient,) = torch.autograd.grad(function(weight).sum(), weight)
        torch.testing.assert_close(gradient, 2 * weight.detach())
