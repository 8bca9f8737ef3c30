"""Summaries of the studies' records: the figures that the tables show, without epochs, rounds or pictures."""

from typing import Any

import numpy as np
from scipy import stats

from loco_ext.analysis.corruptions import FAMILIES, LEVELS
from loco_ext.experiments.frontier_figures import error
from loco_ext.experiments.landscapes import family_accuracy
from loco_ext.experiments.landscapes_figures import by_arm
from loco_ext.experiments.records import Record


def frontier(record: Record) -> Record:
    """Return the points of a frontier: MACs, test errors in percent, latencies, filters left and norms."""
    settings = record["settings"]
    return {
        "training": settings["training"],
        "settings": {name: value for name, value in settings.items() if name != "training"},
        "latency_batch": record["latency_batch"],
        "paths": [
            {
                **{name: path[name] for name in ("width", "path", "macs", "latency")},
                "points": [_point(point) for point in path["points"]],
            }
            for path in record["paths"]
        ],
    }


def _point(point: Record) -> Record:
    return {
        **{name: point[name] for name in ("strength", "tau", "macs")},
        "filters": sum(sum(counts[1:]) for counts in point["kernels"].values()),
        "error": 100 * (1 - point["metrics"]["accuracy"]),
        "refitted_error": error(point) if point["refitted"] else None,
        **{name: point[name] for name in ("latency_before", "latency_after")},
        **{name: point["metrics"][name] for name in ("weight_norm", "effective_norm")},
    }


def efcn(networks: Record) -> list[Record]:
    """Return the networks of the eFCN experiment with their first and last figures."""
    cnn = {"relax": "cnn", "switch_time": None, "before": {}, "after": {}} | networks["cnn"]
    found = [cnn, *networks["branches"], *([networks["fcn"]] if networks["fcn"] else [])]
    kept = ("relax", "switch_time", "parameters", "start", "before", "after")
    return [
        {**{name: network[name] for name in kept}, "epochs": len(network["epochs"]), "last": network["epochs"][-1]}
        for network in found
    ]


def paths(network: Record) -> Record:
    """Return the ends, the highest test accuracy and the highest training loss of each path to a network."""
    methods = {
        name: {
            "points": len(points),
            "ends": [points[place]["test_accuracy"] for place in (0, -1)],
            "best": max(point["test_accuracy"] for point in points),
            # None, as in the points, where a loss is not finite.
            "highest_loss": None if None in (losses := [p["train_loss"] for p in points]) else max(losses),
        }
        for name, points in network["interpolations"].items()
    }
    return {"relax": network["relax"], "switch_time": network["switch_time"], "methods": methods}


def landscapes(record: Record) -> Record:
    """Return each arm's figures, and means over its seeds: accuracies by epoch and by corruption, ablation curves."""
    curves = {
        arm: {
            "test_accuracies": _mean([network["test_accuracies"] for network in found]),
            "kept_by_ablation": _mean([network["ablation"]["kept_probability"] for network in found]),
            **{
                what: {
                    family: _mean(
                        [[family_accuracy(n, family, level, what) for level in range(1, LEVELS + 1)] for n in found]
                    )
                    for family in FAMILIES
                }
                for what in ("accuracy", "kept_probability")
            },
        }
        for arm, found in by_arm(record["networks"]).items()
    }
    at_first = [network["at_first"]["landscape"]["total_variation"] for network in record["networks"]]
    ratios = [network["resampling"]["ratio"] for network in record["networks"]]
    return {
        "arms": record["arms"],
        "curves": curves,
        "total_variation_at_first": float(np.mean(at_first)),
        "lemma_ratio": quartiles(ratios),
    }


def compare(errors: np.ndarray, others: np.ndarray) -> Record:
    """Return mean, standard error and quartiles of test errors, and the difference from another arm's by seed."""
    result = {"error": float(errors.mean()), "standard_error": float(stats.sem(errors))}
    if errors is not others:
        difference = errors - others
        result["difference"] = float(difference.mean())
        result["difference_standard_error"] = float(stats.sem(difference))
        result["paired_p"] = float(stats.ttest_rel(errors, others).pvalue) if difference.any() else 1.0
    return result | quartiles(errors)


def _mean(rows: list[Any]) -> list[float]:
    return [float(f"{value:.4g}") for value in np.mean(rows, axis=0)]


def quartiles(values: Any) -> Record:
    """Return median, quartiles and count of some values."""
    lower, median, upper = np.percentile(values, (25, 50, 75)).tolist()
    return {"median": median, "quartiles": [lower, upper], "count": len(values)}
