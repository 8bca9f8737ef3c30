"""The benchmark of compaction: half-pruned networks need half of the MACs, and the report holds what was measured."""

import json

import pytest
import torch

from bench import bench_compact, harness, tables
from loco_ext import sparsity

pytestmark = pytest.mark.slow

TINY = harness.Effort(min_rounds=2, min_seconds=0.0, warmup=1)


@pytest.mark.parametrize("pattern", bench_compact.PATTERNS)
def test_half_of_the_multiply_adds_are_left(pattern):
    model = bench_compact.half("small", pattern)
    _, report = sparsity.compact(model, torch.zeros(1, 3, 32, 32), cost="multiply_adds")
    assert 0.45 < report.multiply_adds_after / report.multiply_adds_before <= 0.5
    sizes = {size for layer in report.layers for size in layer.sizes}
    assert ("2x2" in sizes) == (pattern != "kernels")


def test_report(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "Effort", lambda **arguments: TINY)
    monkeypatch.setattr(bench_compact, "BATCH_SIZE", 2)
    path = tmp_path / "compact-tiny.json"
    options = ["--networks", "small", "--patterns", "mixed", "--formats", "contiguous", "--threads", "1"]
    assert bench_compact.main([*options, "--quick", "--out", str(path)]) == 0
    (record,) = json.loads(path.read_text())["results"]
    assert list(record["candidates"]) == ["network", "norms folded", "compacted, norms kept", "compacted"]
    assert record["multiply_adds"]["after"] <= record["multiply_adds"]["before"]
    assert "| small | mixed | contiguous | 1 |" in tables.section("compact", tmp_path)
