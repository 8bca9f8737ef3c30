"""Estimates of block_sparse's kernels: what is read from compiled code, and the work that follows from a launch."""

import json

import pytest
import torch

from bench import estimate_block_sparse, generated, tables
from bench.block_sparse_peers import Layer
from loco_ext.geometry import BlockPattern
from tests.triton_runs import needs_compiler

pytestmark = needs_compiler


def test_a_floor_is_each_tensor_once():
    layer = Layer(64, 64, 32, 3)
    values = BlockPattern.from_conv((32, 32), 3, padding=1).nnz * 64 * 64
    for dtype, size in ((torch.bfloat16, 2), (torch.float32, 4)):
        products = estimate_block_sparse.calls(layer, 250, torch.bfloat16, dtype)
        assert [call.floor() for _, call, _ in products] == [2 * 2 * 250 * 1024 * 64 + size * values] * 3


@pytest.mark.slow
def test_estimates_are_written_and_shown(tmp_path, monkeypatch):
    monkeypatch.setitem(estimate_block_sparse.LAYERS, estimate_block_sparse.REFERENCE, Layer(16, 16, 3, 3))
    options = ["--layers", estimate_block_sparse.REFERENCE, "--arithmetic", "bfloat16", "--gpus", "90", "--out"]
    out = tmp_path / "block_sparse_estimate-x.json"
    assert estimate_block_sparse.main([*options, str(out)]) == 0
    report = json.loads(out.read_text())
    text = generated.section("block_sparse_estimate", tables.RENDERERS, tmp_path)
    assert "not measurements" in text
    shown = [report["kernels"][0][name] for name in ("loop", "registers", "warps", "resident", "programs")]
    assert f"| forward | {' | '.join(map(str, shown))} |" in text
    assert len(report["kernels"]) == 3  # those of the first batch
    for step in report["results"]:
        records = estimate_block_sparse.estimates(estimate_block_sparse.REFERENCE, step["batch"], "bfloat16", 90)
        for record in records:
            assert record["estimate"] == max(record["seconds"].values()) >= record["seconds"]["HBM"] > 0
            assert record["l2_bytes"] >= record["seconds"]["HBM"] * 3.35e12
            assert 0 < record["registers"] <= 255
            transposed = 0 if record["product"] == "gradient of values" else step["batch"] * 16 * (9 + 9)
            assert record["transposes"] == pytest.approx(2 * 2 * transposed / 3.35e12)
            assert record["loop"] > 20
        for key in ("estimate", "transposes"):
            assert step[key] == pytest.approx(sum(record[key] for record in records))
        assert step["floor"] == pytest.approx(sum(record["seconds"]["HBM"] for record in records))
