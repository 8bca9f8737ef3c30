"""The CUDA norms and prox of rings executed on the CPU, beyond the tests that they share with the CPU's kernels.

Random calls run under sanitizers against the CPU's kernels. There, every tensor has an allocation of exactly its size.
"""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loco_ext import ops
from loco_ext.ops.ring_prox import ProxCall, run_joint_kernels
from loco_ext.reference import ring_prox as reference
from tests.covering import covering, slow
from tests.cuda_on_cpu import build, operators
from tests.ring_prox.cases import LAYOUTS, rings_of
from tests.tolerances import ULPS_OF_ROOTS, assert_within_ulps, largest_of_kernels, same_bits

SHARED_SOURCES = [
    *(f"ring_prox/{name}" for name in ("gpu_table.cpp", "rows.cpp")),
    "common/cuda_upload.cu",
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = {"one_tap": (3, 5), "one_weight": (4, 1, 1, 1), "3x3": (4, 7, 3, 3), "wide": (3, 20, 1, 15)}
# Values are (with a metric, linf).
MODES = {"l2": (False, False), "metric": (True, False), "linf": (False, True), "linf_metric": (True, True)}


def thresholds_for(weight: torch.Tensor, count: int, rows: bool, linf: bool, share: float = 1.0) -> torch.Tensor:
    """Return thresholds at which some groups vanish and some do not, float64; where there are several, one is 0."""
    kernel = weight.detach().double().flatten(1)
    size = kernel.abs().sum(1).mean() if linf else kernel.norm(dim=1).mean()
    t = torch.rand((len(weight), count) if rows else (count,), dtype=torch.float64) * share * size.nan_to_num() / count
    t[..., count // 2] *= count == 1
    return t


@pytest.mark.parametrize(
    ("orders", "shape"),
    covering([0, 3, 8, 16], [(3, 1, 3, 3), (3, 33, 5, 5), (2, 1150, 3, 3), (3, 4099)], strength=1, sweep=True),
    ids=str,
)
@pytest.mark.usefixtures("cuda_on_cpu")
def test_moments_in_float32_are_enough_for_metrics_of_many_orders_of_magnitude(orders, shape):
    """Zeros are exact, too: where moments in float32 do not tell, they are summed in float64."""
    weight = torch.randn(shape)
    metric = (10.0 ** (torch.rand(shape, dtype=torch.float64) * -orders)).float()
    rings, count = rings_of(shape)
    norms = (weight.double() * metric.double()).flatten(1).norm(dim=1, keepdim=True)
    for share in (1e-3, 0.3, 0.9, 1.5):
        t = share * norms * torch.rand(len(weight), count, dtype=torch.float64)
        out = ops.ring_prox(weight, rings, t, None, metric)
        expected = reference.ring_prox(weight.double(), rings, t, None, metric.double(), False)
        assert_within_ulps(out, expected, ULPS_OF_ROOTS[torch.float32], largest_of_kernels(weight).expand_as(expected))
        assert torch.equal(out == 0, expected == 0)


@pytest.mark.parametrize(
    ("dtype", "size", "mode"),
    covering([torch.float32, torch.float64, torch.bfloat16], ["3x3", "one_tap", "wide"], MODES),
    ids=str,
)
@pytest.mark.usefixtures("cuda_on_cpu")
def test_filters_that_share_a_factor_find_the_references(compiled, dtype, size, mode):
    has_metric, linf = MODES[mode]
    weight = torch.randn(SIZES[size], dtype=torch.float64).to(dtype)
    weight[0] *= 0.1
    metric = (torch.rand(SIZES[size], dtype=torch.float64) + 0.25).to(dtype) if has_metric else None
    rings, count = rings_of(weight.shape)
    library = operators.library(compiled)
    for share, plain in itertools.product((0.03, 0.5), (0.0, 0.2)):
        q = thresholds_for(weight, count, False, linf, share) / largest_of_kernels(weight).max()
        t = thresholds_for(weight, count, False, linf, plain)
        before = library.launches()
        out = ops.ring_prox(weight, rings, t, q, metric, linf=linf, joint=True)
        assert library.launches() - before == 2, "the table's and one more"
        wide = None if metric is None else metric.double()
        expected = reference.ring_prox(weight.double(), rings, t, q, wide, linf, True)
        assert_within_ulps(out, expected, ULPS_OF_ROOTS[dtype], largest_of_kernels(weight).max())
        assert torch.equal(out == 0, expected == 0)


def joint_calls(has_metric: bool, linf: bool) -> list[ProxCall]:
    """Return layers of all dtypes, sizes and layouts, one of one filter, one of none, two with NaN or infinity."""
    calls = []
    sizes = ["3x3", "one_weight", "wide", "one_tap", "wide", "3x3", "one_weight", "wide"]
    for k, (dtype, size) in enumerate(zip(DTYPES * 2, sizes, strict=True)):
        wide = torch.randn(SIZES[size], dtype=torch.float64)
        wide[0] *= 0.1
        weight = LAYOUTS[["contiguous", "gaps", "channels_last"][k % 3]](wide.to(dtype))
        weight = {1: weight[:1], 5: weight[:0]}.get(k, weight)
        metric = torch.rand(weight.shape, dtype=torch.float64).add(0.25).to(dtype) if has_metric else None
        rings, count = rings_of(weight.shape)
        q = thresholds_for(wide, count, k % 2 == 1, linf, 0.3)[: len(weight) if k % 2 else None]
        calls.append(ProxCall(weight, rings, q * (k % 4) / 4, q, metric, linf))
    calls[0].weight[1, 2, 0, 0], calls[2].weight[0, 1, 0, 0] = torch.nan, torch.inf
    large = torch.randn(2, 690, 1, 15)  # just too large for shared memory
    calls.insert(3, replace(calls[2], weight=large, metric=large.square() + 0.5 if has_metric else None))
    return calls


@pytest.mark.parametrize("mode", ["l2", *map(slow, ["metric", "linf_metric"])])
@pytest.mark.usefixtures("cuda_on_cpu")
def test_layers_that_share_a_launch_become_what_they_become_alone(compiled, mode):
    library, calls = operators.library(compiled), joint_calls(*MODES[mode])
    alone = [out for call in calls for out in run_joint_kernels([call])]
    for order in ("forward", "1"):
        library.set_order(order)
        together = run_joint_kernels(calls)
        library.set_order("forward")
        for call, out, one in zip(calls, together, alone, strict=True):
            assert out.stride() == torch.empty_like(call.weight).stride()
            assert same_bits(out, one)
    for call, out in zip(calls, together, strict=True):
        counts = call.weight.flatten(1).isfinite().all(1)
        weight, metric = call.weight[counts].double(), None if call.metric is None else call.metric[counts].double()
        t, q = (value if value.dim() == 1 else value[counts] for value in (call.t, call.q))
        expected = reference.ring_prox(weight, call.rings, t, q, metric, call.linf, True)
        if len(expected) > 0:
            assert_within_ulps(out[counts], expected, ULPS_OF_ROOTS[out.dtype], largest_of_kernels(weight).max())
            assert torch.equal(out[counts] == 0, expected == 0)


@pytest.mark.usefixtures("cuda_on_cpu")
def test_layers_share_a_launch_if_one_of_their_kind_takes_as_many_threads(compiled):
    def launches(calls: list[ProxCall]) -> int:
        before = library.launches()
        run_joint_kernels(calls)
        return library.launches() - before

    library, q = operators.library(compiled), torch.full((1,), 0.2, dtype=torch.float64)
    small = [ProxCall(torch.randn(3, channels, 3, 3), [0] * 9, q, q, None, False) for channels in (1, 2, 64, 113)]
    assert launches(small) == 1 + 1, "the table's and one more"
    assert launches([*small, replace(small[0], weight=torch.randn(2, 114, 3, 3))]) == 1 + 2
    assert launches([replace(call, weight=call.weight.double()) for call in small[:1]] + small) == 1 + 2
    assert launches(small[:1] * 25) == 1 + 2, "a launch takes 24 layers"
    assert launches([replace(small[0], weight=torch.empty(0, 1, 3, 3))]) == 0
    shapes = [(2, channels, 3, 3) for channels in (3, 64, 128, 256, 512)] + [(2, c, 1, 1) for c in (64, 128, 256)]
    of_resnet18 = [ProxCall(w, [0] * w[0, 0].numel(), q, q, w.square() + 0.5, False) for w in map(torch.randn, shapes)]
    assert launches(of_resnet18) == 1 + 4
    assert run_joint_kernels([]) == []


@pytest.mark.usefixtures("cuda_on_cpu")
def test_wrong_lists_of_layers_are_refused():
    prox = torch.ops.loco_ext_on_cpu.joint_ring_prox
    w, t = torch.randn(2, 3, 3), torch.ones(1, dtype=torch.float64)
    an_entry = "rings: expected one entry for each tap of each weight"
    for message, call in [
        ("weights: expected one or more", lambda: prox([w, w], [0] * 6, [t, t], [t], [], False)),
        ("weights: expected one or more", lambda: prox([w, w], [0] * 6, [t, t], [t, t], [w], False)),
        (an_entry, lambda: prox([w, w], [0] * 5, [t] * 2, [t] * 2, [], False)),
        (an_entry, lambda: prox([w, w], [0] * 7, [t] * 2, [t] * 2, [], False)),
        ("metric: expected weight's shape", lambda: prox([w, w], [0] * 6, [t] * 2, [t] * 2, [w, w[:1]], False)),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call()


@pytest.mark.usefixtures("cuda_on_cpu")
def test_filters_with_infinite_weights_and_nan_do_not_count_for_the_shared_factor():
    weight = torch.randn(5, 7, 3, 3)
    rings, count = rings_of(weight.shape)
    t, q = torch.zeros(count, dtype=torch.float64), torch.full((count,), 0.3, dtype=torch.float64)
    expected = ops.ring_prox(weight[2:], rings, t, q, joint=True)
    weight[0, 3, 1, 1], weight[1, 2, 0, 0] = torch.nan, torch.inf
    out = ops.ring_prox(weight, rings, t, q, joint=True)
    assert same_bits(out[2:], expected)
    assert out[0].isnan().all()
    assert ops.ring_prox(torch.zeros(3, 2), [0], t[:1], q[:1], joint=True).eq(0).all()


def compile_check(folder: Path, kernels: str, program: str, sanitize: bool) -> Path:
    """Compile a check program."""
    sources = [build.CSRC / name for name in (f"ring_prox/{kernels}.cu", *SHARED_SOURCES)]
    out = folder / f"{program}{'_sanitized' * sanitize}"
    return build.compile_program([*sources, build.HERE / f"{program}.cpp"], out, sanitize=sanitize)


@pytest.fixture(scope="module")
def check(compiled: Path) -> Path:
    return compile_check(compiled, "cuda", "check_ring_prox", sanitize=True)


@pytest.fixture(scope="module")
def check_joint(compiled: Path) -> Path:
    """Return a program without sanitizers, as these let one block run at a time."""
    return compile_check(compiled, "cuda_joint", "check_joint_prox", sanitize=False)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "calls"), [("check", 20), ("check_joint", 8)])
def test_random_calls_give_the_same_bits_in_every_order(program: str, calls: int, request) -> None:
    build.check_orders(request.getfixturevalue(program), 0, calls)


@pytest.mark.slow
def test_many_random_calls_agree_with_the_cpu(check: Path) -> None:
    build.check_many(check, 200)


MISTAKES = ("tail", "buffer", "filter", "scale", "staged", "order", "ring", "caps", "factors", "first")


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(check: Path, mistake: str) -> None:
    assert build.is_found(check, f"ring_{mistake}", 60, ("forward", "eager"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3018000, 3023006])
def test_a_filter_with_a_nan_in_a_ring_of_no_joint_penalty_does_not_count(check_joint: Path, seed: int) -> None:
    done = build.run_program(check_joint, seed, 1)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_many_random_joint_calls_keep_to_their_memory(compiled: Path) -> None:
    build.check_many(compile_check(compiled, "cuda_joint", "check_joint_prox", sanitize=True), 10)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["meeting", "release", "arrived", "layer"])
def test_mistakes_where_blocks_meet_are_found(check_joint: Path, mistake: str) -> None:
    assert build.is_found(check_joint, f"joint_{mistake}", 4, ("1", "2"))
