"""Tests of the figures made from timings: bandwidths, ratios, and targets judged by the worst case."""

import importlib
import json
import math

import pytest

from bench import bench_optim_step_gpu, harness, shapes
from bench.targets import target

NAMES = ("optim_step_gpu", "ring_prox", "block_sparse", "block_sparse_gpu", "landscape", "regions")


def committed(name):
    """Return the committed report of a benchmark."""
    (path,) = harness.RESULTS.glob(f"{name}-*.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_targets_follow_from_what_was_measured(name):
    report = committed(name)
    rows = importlib.import_module(f"bench.bench_{name}").targets(report)
    assert rows == [row | {"measured": pytest.approx(row["measured"])} for row in report["targets"]]


def test_a_target_is_judged_by_the_worst_case():
    measured = {"a": 1.0, "b": 3.0, "c": 2.0}
    (most,), (least,) = target("time", 2, measured, at_least=False), target("speed", 1, measured, at_least=True)
    assert most == {"name": "time", "wanted": "at most 2", "measured": 3.0, "met": False, "where": "b"}
    assert least == {"name": "speed", "wanted": "at least 1", "measured": 1.0, "met": True, "where": "a"}
    assert target("time", 2, {}, at_least=False) == []


@pytest.mark.parametrize("name", ["optim_step", "optim_step_gpu"])
def test_networks_have_the_parameters_that_were_measured(name):
    records = committed(name)["results"]
    networks = shapes.GPU_NETWORKS if name.endswith("gpu") else shapes.NETWORKS
    assert {record["network"] for record in records} == networks.keys()
    for record in records:
        sizes = [math.prod(shape) for shape in networks[record["network"]]()]
        assert (len(sizes), sum(sizes)) == (record["tensors"], record["elements"])


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_committed_figures_of_a_step_follow_from_its_times(mode):
    """An eager step takes the longer of the times of GPU and host, a replayed one the GPU's."""
    report = committed("optim_step_gpu")
    copy = report["copy_bandwidth"]["median"]
    for record in report["results"]:
        if record["mode"] == mode:
            case = bench_optim_step_gpu.Case(*(record[key] for key in ("network", "rule", "dtype", "mode")))
            gpu, host = (
                {name: harness.Timing(**timings[clock]) for name, timings in record["candidates"].items()}
                for clock in ("gpu", "host")
            )
            found = bench_optim_step_gpu.record(case, gpu, host, copy)
            for timings in found["candidates"].values():
                times = [timings[clock]["median"] for clock in ("gpu", "host")]
                assert timings["seconds"] == (max(times) if mode == "eager" else times[0])
            assert found["bytes"] == record["bytes"]
            for key in ("gpu", "step"):
                assert found["ratios"][key] == pytest.approx(record["ratios"][key])
            for name, rate in found["bandwidth"].items():
                assert rate == pytest.approx(record["bandwidth"][name])
