"""Tests of the figures made from timings: bytes, bandwidths, ratios, and targets judged by the worst case."""

import itertools
import math

import pytest

from bench import bench_block_sparse_gpu, bench_optim_step_gpu, bench_ring_prox, harness, shapes
from bench.bench_block_sparse_gpu import REFERENCE
from bench.bench_optim_step_gpu import Case


def timing(seconds):
    return harness.Timing(median=seconds, p20=seconds, p80=seconds, best=seconds, rounds=1)


def made_up(case, gpu, host, copy=1e12):
    """Return a record of made-up times of GPU and host, in microseconds, and a copy bandwidth in bytes/s."""
    both = ({name: timing(1e-6 * value) for name, value in values.items()} for values in (gpu, host))
    return bench_optim_step_gpu.record(case, *both, copy)


def test_an_eager_step_takes_the_longer_of_gpu_and_host_and_a_replayed_one_the_gpus_time():
    gpu = {"torch_fused": 300.0, "cuda_uniform": 200.0, "cuda_loco": 202.0}
    host = {"torch_fused": 500.0, "cuda_uniform": 50.0, "cuda_loco": 50.0}
    eager = made_up(Case("resnet50", "sgd", "float32", "eager"), gpu, host)
    graph = made_up(Case("resnet50", "sgd", "float32", "graph"), gpu, host)
    assert eager["candidates"]["torch_fused"]["seconds"] == pytest.approx(500e-6)
    assert eager["ratios"]["step"]["cuda / torch fused"] == pytest.approx(200 / 500)
    assert graph["ratios"]["step"]["cuda / torch fused"] == pytest.approx(200 / 300)
    for record in (eager, graph):
        assert record["ratios"]["gpu"] == pytest.approx({"cuda / torch fused": 200 / 300, "loco / uniform": 1.01})


@pytest.mark.parametrize(("rule", "dtype", "size"), [("sgd", "float32", 20), ("adamw", "bfloat16", 14)])
def test_bandwidth_on_a_gpu_counts_the_bytes_of_a_step(rule, dtype, size):
    record = made_up(Case("resnet50", rule, dtype, "graph"), {"cuda_uniform": 100.0}, {"cuda_uniform": 1.0}, copy=1e13)
    moved = 25_557_032 * size
    assert record["bytes"] == moved
    rate = record["bandwidth"]["cuda_uniform"]
    assert rate == pytest.approx({"bytes_per_second": moved / 1e-4, "of_copy": moved / 1e-4 / 1e13})


def records(**changes):
    """Return records of every network in both modes; ``changes`` replace microseconds of ResNet-50's eager SGD step."""
    found = []
    for network, mode in itertools.product(shapes.GPU_NETWORKS, ("eager", "graph")):
        gpu = {"torch_fused": 280.0, "torch_foreach": 900.0, "cuda_uniform": 200.0, "triton_uniform": 500.0}
        gpu |= {"cuda_loco": 204.0} if network.startswith("resnet") else {}
        host = dict.fromkeys(gpu, 90.0)
        if (network, mode) == ("resnet50", "eager"):
            gpu |= {name: value for name, value in changes.items() if name != "host"}
            host["cuda_loco"] = changes.get("host", 90.0)
        elements = sum(map(math.prod, shapes.GPU_NETWORKS[network]()))
        copy = 20 * elements / 200e-6 / 0.9  # such that cuda_uniform reaches 0.9 of it
        found.append(made_up(Case(network, "sgd", "float32", mode), gpu, host, copy))
    return found


NO_SYNCS = {"cuda sgd": 0, "triton sgd": 3}


@pytest.mark.parametrize(
    ("changes", "syncs", "missed", "where"),
    [
        ({}, NO_SYNCS, [], ""),
        ({"cuda_loco": 250.0}, NO_SYNCS, [0, 3], "resnet50 sgd float32 eager, cuda_loco"),
        ({"torch_fused": 220.0}, NO_SYNCS, [1], "resnet50 sgd float32 eager"),
        ({"host": 130.0}, NO_SYNCS, [4], "resnet50 sgd float32 eager, cuda_loco"),
        ({}, {"cuda sgd": 0, "cuda adamw": 1}, [5], "cuda adamw"),
    ],
)
def test_targets_are_judged_by_the_worst_case(changes, syncs, missed, where):
    rows = bench_optim_step_gpu.targets(records(**changes), syncs)
    assert [i for i, row in enumerate(rows) if not row["met"]] == missed
    if missed:
        assert rows[missed[0]]["where"] == where
    else:
        measured = [row["measured"] for row in rows]
        assert measured == pytest.approx([0.9 * 200 / 204, 1.4, 1.4, 1.02, 90.0, 0.0])
        wanted = ["at least 0.85", "at least 1.3", "at least 1.3", "at most 1.03", "at most 100", "at most 0"]
        assert [row["wanted"] for row in rows] == wanted


def test_targets_of_what_was_not_measured_are_left_out():
    small = [record for record in records() if record["network"] == "thousand_small"]
    names = [row["name"] for row in bench_optim_step_gpu.targets(small, {})]
    assert names == ["times faster than torch fused, 1,000 small tensors", "host time of a step in microseconds"]


def test_targets_of_the_prox_are_judged_by_the_worst_case():
    def prox(case, threads, value):
        return {"case": case, "threads": threads, "ratios": {"eager by groups / ours": value}}

    def step(rule, value):
        return {"rule": rule, "threads": 2, "ratios": {"all / without": value, "more than one tap / without": 1.0}}

    results = [prox("half rings", 1, 25.0), prox("half rings", 2, 21.0), prox("kernels", 1, 2.0)]
    rows = bench_ring_prox.targets(results, [step("sgd", 1.1), step("adam", 1.6)])
    assert [(row["measured"], row["wanted"], row["met"], row["where"]) for row in rows] == [
        (21.0, "at least 20", True, "half rings, threads 2"),
        (1.1, "at most 1.15", True, "all / without, threads 2"),
        (1.6, "at most 1.5", False, "all / without, threads 2"),
    ]
    assert bench_ring_prox.targets([], []) == []


def test_targets_are_judged_by_the_reference_layer():
    def measured(layer, batch, arithmetic, mode, microseconds=999.0, speedup=1.0):
        times = {"candidates": {"ours": {"gpu": {"median": 1e-6 * microseconds}}}}
        case = {"layer": layer, "batch": batch, "arithmetic": arithmetic, "pass": mode}
        return case | times | {"ratios": {"unfold+bmm / ours": speedup}}

    others = [
        measured(REFERENCE, 250, "bfloat16", "forward"),
        measured(REFERENCE, 250, "float32", "training"),
        measured(REFERENCE, 64, "bfloat16", "training"),
        measured("smaller", 250, "bfloat16", "training"),
    ]
    assert bench_block_sparse_gpu.targets(others) == []
    rows = bench_block_sparse_gpu.targets([*others, measured(REFERENCE, 250, "bfloat16", "training", 240.0, 3.5)])
    assert [(row["wanted"], row["met"]) for row in rows] == [("at most 246", True), ("at least 4", False)]
    assert [row["measured"] for row in rows] == pytest.approx([240.0, 3.5])
