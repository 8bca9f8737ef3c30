"""The benchmark of block-sparse multiplication: agreement of all candidates, and contents of reports and tables."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import bench_block_sparse, block_sparse_peers, harness, tables
from bench.bench_block_sparse import PASSES, expected, make_problem, makers
from bench.block_sparse_peers import PEERS, Layer, cannot
from tests.bench.gpu_on_cpu import TINY

pytestmark = pytest.mark.slow

LAYERS = {
    "same size": Layer(4, 4, 5, 3),
    "smaller": Layer(3, 4, 8, 4, stride=2, padding=2),
    "even groups": Layer(6, 4, 5, 3, groups=2),
    "depthwise": Layer(5, 5, 6, 5, padding=2, groups=5),
}


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the benchmark's layers by small ones."""
    monkeypatch.setattr(bench_block_sparse, "LAYERS", LAYERS)
    monkeypatch.setattr(bench_block_sparse, "BATCHES", dict.fromkeys(LAYERS, (2, 64)))
    monkeypatch.setattr(bench_block_sparse, "PEER_CASES", (("same size", 64),))
    monkeypatch.setattr(bench_block_sparse, "extra_memory", lambda *_: 0.002)
    monkeypatch.setattr(harness, "in_fresh_process", lambda function, *arguments: 0.002)
    bandwidth = harness.bandwidth
    monkeypatch.setattr(harness, "bandwidth", lambda threads, effort: bandwidth(threads, TINY, elements=1000))
    monkeypatch.setattr(harness, "Effort", lambda **_: TINY)


@pytest.fixture(scope="module")
def report_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results") / "block_sparse-tiny.json"
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        assert bench_block_sparse.main(["--quick", "--out", str(path)]) == 0
    return path


def candidates(name: str) -> dict[str, Any]:
    problem = make_problem(LAYERS[name], 6)
    peers = [peer for peer in PEERS if cannot(peer, LAYERS[name]) is None]
    return {label: make() for label, make in makers(problem, peers).items()}


@pytest.mark.parametrize("name", LAYERS)
def test_all_candidates_but_convolution_give_the_references_result(name: str) -> None:
    reference = expected(make_problem(LAYERS[name], 6))
    found = candidates(name)
    assert len(found) == 6 + sum(cannot(peer, LAYERS[name]) is None for peer in PEERS)
    for label, candidate in found.items():
        y = candidate.result(candidate.forward())
        if not label.startswith("conv2d"):
            bench_block_sparse.check(label, y, reference)
        assert y[:4].shape == reference.shape


@pytest.mark.parametrize("name", ["same size", "smaller"])
def test_peers_have_the_gradients_of_ours(name: str) -> None:
    found = candidates(name)
    x_gradient = found["ours NCHW"].training()[0]
    torch.testing.assert_close(found["unfold+bmm"].training()[0], x_gradient)
    by_pixel = found["dense"].training()[0].view(6, LAYERS[name].size, LAYERS[name].size, -1)
    torch.testing.assert_close(by_pixel.permute(0, 3, 1, 2), x_gradient)


def test_with_shared_values_ours_is_the_convolution() -> None:
    layer = LAYERS["even groups"]
    problem = make_problem(layer, 3)
    weight = torch.randn(4, 3, 3, 3)
    taps = layer.taps()
    tap = torch.arange(9).expand_as(taps)[taps >= 0]
    by_tap = weight.view(2, 2, 3, 9).permute(3, 0, 2, 1)  # [taps, groups, C_in / groups, C_out / groups]
    problem.values.copy_(by_tap[tap])
    found = bench_block_sparse.ours(problem, torch.channels_last).forward()
    torch.testing.assert_close(found, torch.nn.functional.conv2d(problem.x, weight, padding=1, groups=2))


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)

    def wrong(problem: block_sparse_peers.Problem) -> block_sparse_peers.Candidate:
        return block_sparse_peers.Candidate(lambda: problem.grad * 0, None, lambda y: y)

    monkeypatch.setitem(PEERS, "dense", wrong)
    with pytest.raises(RuntimeError, match="same size, dense: expected the reference's result"):
        bench_block_sparse.measure("same size", 64, 1, TINY, ["dense"])


def test_memory_is_counted_beyond_what_is_returned() -> None:
    layer = Layer(16, 16, 16, 3)
    shares = [bench_block_sparse.extra_memory(layer, 64, name, "forward") for name in ("ours NHWC", "unfold+bmm")]
    if shares[0] is None:
        pytest.skip("this system does not tell a process' peak memory")
    assert shares[1] > 3 > 0.5 > shares[0]


def test_who_has_no_part_in_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cannot("unfold+bmm", LAYERS["depthwise"]) == "no groups"
    assert cannot("torch BSR", LAYERS["smaller"]) == "square blocks only"
    assert cannot("dense", Layer(64, 64, 32, 3)) == "a matrix of 4,294,967,296 elements"
    monkeypatch.setattr(block_sparse_peers, "find_spec", lambda name: None)
    assert cannot("JAX", LAYERS["smaller"]) == "jax is not installed"


def test_report_has_every_field(report_path: Path) -> None:
    report = json.loads(report_path.read_text())
    fields = {"benchmark", "machine", "settings", "bandwidth", "not_measured", "results", "memory", "targets"}
    assert set(report) == fields
    cases = [(r["layer"], r["batch"], r["threads"], r["pass"]) for r in report["results"]]
    assert cases == [*itertools.product(LAYERS, (2, 64), (1, 2), PASSES)]
    for record in report["results"]:
        peers = (
            set(PEERS) - set(report["not_measured"])
            if (record["layer"], record["batch"]) == ("same size", 64)
            else set()
        )
        found = {name for name in record["candidates"] if name in PEERS}
        assert found == peers - ({"torch BSR"} if record["pass"] == "training" else set())
        assert {"ours / conv2d, NHWC", "float32 / bfloat16, ours"} <= set(record["ratios"])
    assert [row["name"] for row in report["targets"]][:2] == [
        "forward: ours / conv2d, NCHW",
        "forward: ours / conv2d, NHWC",
    ]
    assert report["targets"][-1]["measured"] == 0.002


def test_tables_show_the_report(report_path: Path) -> None:
    text = tables.section("block_sparse", report_path.parent)
    assert "| same size | 64 | forward and backward | 2 |" in text
    assert "0.2%" in text
    assert "unfold+bmm / ours" in text
