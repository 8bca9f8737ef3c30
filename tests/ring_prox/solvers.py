"""Other solvers for the prox of nested rings: SPAMS, accelerated proximal gradient and CVXPY; and wrong methods."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import cvxpy
import numpy as np
import pytest
import torch
from scipy import sparse
from torch import Tensor

from tests.ring_prox.cases import Case

Array = np.ndarray


def by_spams(case: Case) -> Tensor:
    """Return SPAMS' prox of a case without a metric or squares.

    SPAMS gives NaN for a group whose weights are all 0 and whose threshold is 0.
    """
    assert case.metric is None
    assert case.squared is None
    x = _spams(case.weight.flatten(2).numpy(), case.rings.of_taps, case.thresholds.numpy(), case.norm)
    return torch.from_numpy(x).view_as(case.weight)


def _spams(u: Array, rings: list[int], thresholds: Array, norm: str) -> Array:
    """Return SPAMS' prox of ``u``, float64 ``[kernels, channels, taps]``.

    SPAMS needs the variables of each group to be contiguous, ordered from the centre outwards. The test is skipped
    where it is not installed.
    """
    spams = pytest.importorskip("spams")
    kernels, channels, taps = u.shape
    order = np.argsort(-np.asarray(rings), kind="stable")
    columns = np.asfortranarray(u[:, :, order].transpose(2, 1, 0).reshape(taps * channels, kernels))
    tree = tree_of(rings, channels, thresholds)
    found = spams.proximalTree(columns, tree, False, numThreads=1, lambda1=1.0, regul=f"tree-{norm}")
    x = np.empty_like(u)
    x[:, :, order] = found.reshape(taps, channels, kernels).transpose(2, 1, 0)
    return x


def tree_of(rings: list[int], channels: int, thresholds: Array) -> dict[str, Any]:
    """Return the nested groups as SPAMS takes them, the whole filter first."""
    own = np.bincount(rings)[::-1].astype(np.int32) * channels
    return {
        "eta_g": np.ascontiguousarray(thresholds[::-1]),
        "groups": sparse.csc_matrix(np.asfortranarray(np.eye(len(own), k=-1, dtype=bool))),  # nested in the one before
        "own_variables": (np.cumsum(own) - own).astype(np.int32),
        "N_own_variables": own,
    }


def by_proximal_gradient(case: Case) -> Tensor:
    """Return the prox in a metric, by accelerated proximal gradient (Beck and Teboulle 2009).

    Each step has length 1 / max d and is followed by SPAMS' prox without a metric. The momentum is the constant one
    for a strongly convex function. All kernels share one scale of the thresholds, which are divided by the largest d.
    """
    assert case.metric is not None
    assert case.squared is None
    taps = case.rings.of_taps
    u, d = case.weight.flatten(2).numpy(), case.metric.flatten(2).numpy()
    largest = d.max()
    root = np.sqrt(d.min() / largest)
    momentum = (1 - root) / (1 + root)
    t = case.thresholds.numpy() / largest
    x = y = u
    for _ in range(20_000):
        before, x = x, _spams(y - d * (y - u) / largest, taps, t, case.norm)
        y = x + momentum * (x - before)
        if (np.abs(x - before).max((1, 2)) <= 1e-15 * np.abs(u).max((1, 2))).all():
            break
    return torch.from_numpy(x).view_as(case.weight)


def clarabel(problem: cvxpy.Problem) -> None:
    """Solve a problem by CLARABEL with short steps and no regularisation.

    These settings find minima at the apex of a cone to 1e-8 instead of 1e-5. CLARABEL then often warns that it missed
    its tolerances, which are tighter than is needed here.
    """
    options = {f"tol_{name}": 1e-11 for name in ("gap_abs", "gap_rel", "feas", "ktratio")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Solution may be inaccurate")
        problem.solve(solver="CLARABEL", max_step_fraction=0.6, static_regularization_enable=False, **options)


def by_cvxpy(case: Case) -> Tensor:
    """Return CLARABEL's minimum, kernel by kernel.

    Each kernel is divided by its largest weight, because CLARABEL's tolerances are absolute.
    """
    index = np.asarray(case.rings.of_taps)
    found = []
    for o, kernel in enumerate(case.weight):
        size = kernel.abs().max().item()
        u = kernel.flatten(1).numpy() / size  # [channels, taps]
        d = np.ones_like(u) if case.metric is None else case.metric[o].flatten(1).numpy()
        x = cvxpy.Variable(u.shape)
        parts = [cvxpy.vec(x[:, np.flatnonzero(index <= n)], order="F") for n in range(case.rings.count)]
        norms = cvxpy.hstack([cvxpy.norm(part, 2 if case.norm == "l2" else "inf") for part in parts])
        objective = cvxpy.sum_squares(cvxpy.multiply(np.sqrt(d / 2), x - u)) + _row(case.thresholds, o) / size @ norms
        if case.squared is not None:
            objective += cvxpy.square(_row(case.squared, o) @ norms)
        clarabel(cvxpy.Problem(cvxpy.Minimize(objective)))
        found.append(torch.from_numpy(x.value * size).view_as(kernel))
    return torch.stack(found)


def _row(thresholds: Tensor, kernel: int) -> Array:
    return (thresholds if thresholds.dim() == 1 else thresholds[kernel]).numpy()


def outermost_last(case: Case) -> Tensor:
    """Return the result of a wrong method: the groups are shrunk one by one, but with the largest group first."""
    x = case.weight.double().flatten(2).clone()
    index = torch.tensor(case.rings.of_taps)
    for n in reversed(range(case.rings.count)):
        group = x[:, :, index <= n]
        norm = group.flatten(1).norm(dim=1)[:, None, None]
        x[:, :, index <= n] = group * (1 - case.thresholds[n] / norm).clamp(min=0)
    return x.view_as(case.weight)


def shrunk_group_by_group(case: Case) -> Tensor:
    """Return the result of a method that is wrong in a metric: each group, in right order, is shrunk by itself."""
    x, none = case.weight, torch.zeros_like(case.thresholds)
    for n in range(case.rings.count):
        alone = torch.where(torch.arange(case.rings.count) == n, case.thresholds, none)
        x = replace(case, weight=x, thresholds=alone).prox()
    return x
