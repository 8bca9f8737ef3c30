"""The benchmark of block-sparse multiplication on a GPU, run on the CPU: candidates, reports, targets and tables."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import loco_ext
from bench import bench_block_sparse_gpu, machine, tables
from bench.bench_block_sparse_gpu import ARITHMETIC, REFERENCE, measure, multiplying
from bench.bench_optim_step_gpu import Flush
from bench.block_sparse_peers import Layer
from loco_ext.ops import backends
from tests.bench.gpu_on_cpu import FACTS, TINY, run_on_the_cpu

pytestmark = pytest.mark.slow

SMALL = {
    REFERENCE: Layer(4, 4, 5, 3),
    "smaller": Layer(3, 4, 8, 4, stride=2, padding=2),
    "depthwise": Layer(5, 5, 6, 5, padding=2, groups=5),
}
BATCHES = {REFERENCE: (1, 250), "smaller": (6,), "depthwise": (6,)}


@pytest.fixture(autouse=True)
def _no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the GPU's benchmark run on the CPU, where "triton" stands for the native backend."""
    run_on_the_cpu(monkeypatch)
    monkeypatch.setattr(bench_block_sparse_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(bench_block_sparse_gpu, "LAYERS", SMALL)
    monkeypatch.setattr(bench_block_sparse_gpu, "BATCHES", BATCHES)
    monkeypatch.setitem(bench_block_sparse_gpu.OPTIONS, "layers", SMALL)


def test_report_and_tables(tmp_path: Path) -> None:
    path = tmp_path / "block_sparse_gpu-made-up.json"
    assert bench_block_sparse_gpu.main(["--out", str(path)]) == 0
    report = json.loads(path.read_text())
    fields = {"benchmark", "machine", "settings", "copy_bandwidth", "not_measured", "results", "targets"}
    assert set(report) == fields
    assert report["machine"].items() >= FACTS.items()
    cases = [(r["layer"], r["batch"], r["arithmetic"]) for r in report["results"][::2]]
    assert cases == [
        (REFERENCE, 1, "bfloat16"),
        *((REFERENCE, 250, arithmetic) for arithmetic in ARITHMETIC),
        ("smaller", 6, "bfloat16"),
        ("depthwise", 6, "bfloat16"),
    ]
    assert report["settings"]["cases"] == len(report["results"]) == 12
    for record in report["results"]:
        peers = set() if record["layer"] == "depthwise" else {"unfold+bmm"}
        assert set(record["candidates"]) == {"ours", "conv2d NCHW", "conv2d NHWC"} | peers
        assert len(record["ratios"]) == 2 + len(peers)
        assert record["of_floor"] == pytest.approx(record["candidates"]["ours"]["gpu"]["median"] / record["floor"])
    text = tables.section("block_sparse_gpu", tmp_path)
    assert "Made-Up GPU 80GB" in text
    assert "\n| smaller | 6 | forward and backward | bfloat16 |" in text
    assert "| times faster than unfold+bmm, the same | at least 4 |" in text
    assert "No GPU has been measured" in tables.section("block_sparse_gpu", tmp_path / "nothing")


@pytest.mark.parametrize(("arithmetic", "size"), [("bfloat16", 2), ("float32", 4)])
def test_the_floor_is_a_copys_time_for_the_operands_of_each_product(arithmetic: str, size: int) -> None:
    forward, training = measure("smaller", 6, arithmetic, TINY, Flush(lambda: None, 1e-3), 1e12)
    pairs = len(SMALL["smaller"].pattern().col_indices)
    moved = size * (6 * 3 * 64 + 6 * 4 * 25 + pairs * 3 * 4)
    assert forward["floor"] == pytest.approx(moved / 1e12)
    assert training["floor"] == pytest.approx(3 * moved / 1e12)


def record(layer: str, batch: int, arithmetic: str, mode: str, microseconds: float, speedup: float) -> dict[str, Any]:
    return {
        "layer": layer,
        "batch": batch,
        "arithmetic": arithmetic,
        "pass": mode,
        "candidates": {"ours": {"gpu": {"median": 1e-6 * microseconds}}},
        "ratios": {"unfold+bmm / ours": speedup},
    }


def test_targets_are_judged_by_the_reference_layer() -> None:
    others = [
        record(REFERENCE, 250, "bfloat16", "forward", 999.0, 1.0),
        record(REFERENCE, 250, "float32", "training", 999.0, 1.0),
        record(REFERENCE, 64, "bfloat16", "training", 999.0, 1.0),
        record("smaller", 250, "bfloat16", "training", 999.0, 1.0),
    ]
    assert bench_block_sparse_gpu.targets(others) == []
    rows = bench_block_sparse_gpu.targets([*others, record(REFERENCE, 250, "bfloat16", "training", 240.0, 3.5)])
    assert [(row["wanted"], row["met"]) for row in rows] == [("at most 246", True), ("at least 4", False)]
    assert [row["measured"] for row in rows] == pytest.approx([240.0, 3.5])


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_block_sparse_gpu, "expected", lambda problem: torch.full((4, 4, 5, 5), torch.nan))
    with pytest.raises(RuntimeError, match=f"{REFERENCE}, batch 6, tf32, ours: expected the reference's result"):
        measure(REFERENCE, 6, "tf32", TINY, Flush(lambda: None, 1e-3), 1e12)


@pytest.mark.parametrize("arithmetic", ["tf32", "float32"])
def test_all_multiply_alike(arithmetic: str) -> None:
    def allowed() -> list[bool]:
        return [torch.backends.cuda.matmul.fp32_precision == "tf32", torch.backends.cudnn.allow_tf32]

    before = allowed()
    with multiplying(ARITHMETIC[arithmetic]):
        assert allowed() == [arithmetic == "tf32"] * 2
    assert allowed() == before == [False, True]


def test_ours_is_measured_in_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forced: list[str] = []
    backend = loco_ext.backend
    monkeypatch.setattr(loco_ext, "backend", lambda name: forced.append(name) or backend("native"))
    monkeypatch.setattr(bench_block_sparse_gpu, "measure", lambda *_: forced.append("measured") or [])
    bench_block_sparse_gpu.main(["--quick", "--layers", "smaller"])
    assert forced == ["triton", "measured"]


def test_only_a_full_run_writes_the_committed_file() -> None:
    def full(*argv: str) -> bool:
        return bench_block_sparse_gpu.COMMAND.is_full(bench_block_sparse_gpu.COMMAND.parse(argv))

    assert full()
    assert not any(full(*argv) for argv in (["--quick"], ["--layers", "smaller"], ["--arithmetic", "tf32"]))


@pytest.mark.parametrize(
    ("no_gpu", "missing", "said"), [("no NVIDIA GPU", None, "no NVIDIA GPU"), (None, "no triton", "no triton")]
)
def test_what_stands_in_the_way_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_gpu: str, missing: str, said: str
) -> None:
    monkeypatch.setattr(machine, "no_gpu", lambda: no_gpu)
    monkeypatch.setattr(backends, "missing", lambda *_: missing)
    assert bench_block_sparse_gpu.main([]) == 2
    assert capsys.readouterr().err == f"bench_block_sparse_gpu: {said}\n"
