"""The prox of nested rings by others: SPAMS, accelerated proximal gradient and CVXPY."""

from __future__ import annotations

import warnings
from dataclasses import replace

import cvxpy
import numpy as np
import spams
import torch
from ring_prox_cases import Case
from scipy import sparse
from torch import Tensor

Array = np.ndarray


def by_spams(case: Case) -> Tensor:
    """Without a metric or squares. SPAMS gives NaN for a group without a weight other than 0 and threshold 0."""
    assert case.metric is None
    assert case.squared is None
    x = _spams(case.weight.flatten(2).numpy(), case.rings.of_taps, case.thresholds.numpy(), case.norm)
    return torch.from_numpy(x).view_as(case.weight)


def _spams(u: Array, rings: list[int], thresholds: Array, norm: str) -> Array:
    """``u``: float64 ``[kernels, channels, taps]``. SPAMS wants the variables of each group together, and the root's
    the innermost ring first: from the centre outwards."""
    kernels, channels, taps = u.shape
    order = np.argsort(-np.asarray(rings), kind="stable")
    columns = np.asfortranarray(u[:, :, order].transpose(2, 1, 0).reshape(taps * channels, kernels))
    own = np.bincount(rings)[::-1].astype(np.int32) * channels
    tree = {
        "eta_g": np.ascontiguousarray(thresholds[::-1]),
        "groups": sparse.csc_matrix(np.asfortranarray(np.eye(len(own), k=-1, dtype=bool))),  # each in the one before
        "own_variables": (np.cumsum(own) - own).astype(np.int32),
        "N_own_variables": own.astype(np.int32),
    }
    found = spams.proximalTree(columns, tree, False, numThreads=1, lambda1=1.0, regul=f"tree-{norm}")
    x = np.empty_like(u)
    x[:, :, order] = found.reshape(taps, channels, kernels).transpose(2, 1, 0)
    return x


def by_proximal_gradient(case: Case, steps: int = 20_000) -> Tensor:
    """In a metric, by steps of length 1 / max d, each followed by SPAMS' prox without a metric; accelerated (Beck and
    Teboulle 2009), with the constant momentum for a strongly convex function. One threshold scale for all kernels, so
    each kernel is first divided by its largest d: that multiplies its thresholds by the same."""
    assert case.metric is not None
    assert case.squared is None
    taps = case.rings.of_taps
    u, d = case.weight.flatten(2).numpy(), case.metric.flatten(2).numpy()
    largest = d.max()
    root = np.sqrt(d.min() / largest)
    momentum = (1 - root) / (1 + root)
    t = case.thresholds.numpy() / largest
    x = y = u
    for _ in range(steps):
        before, x = x, _spams(y - d * (y - u) / largest, taps, t, case.norm)
        y = x + momentum * (x - before)
        if np.abs(x - before).max() <= 1e-17 * np.abs(u).max():
            break
    return torch.from_numpy(x).view_as(case.weight)


def clarabel(problem: cvxpy.Problem) -> None:
    """Short steps and no regularisation find minima at the apex of a cone to 1e-8, not 1e-5. It then often warns
    that it is not as close as it was asked to come, which is closer than it needs to be here."""
    options = {f"tol_{name}": 1e-11 for name in ("gap_abs", "gap_rel", "feas", "ktratio")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Solution may be inaccurate")
        problem.solve(solver="CLARABEL", max_step_fraction=0.6, static_regularization_enable=False, **options)


def by_cvxpy(case: Case) -> Tensor:
    """CLARABEL's minimum, kernel by kernel, each divided by its largest weight, for tolerances are absolute."""
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
    """A wrong method: the same shrinking group by group, but with the largest group first."""
    x = case.weight.double().flatten(2).clone()
    index = torch.tensor(case.rings.of_taps)
    for n in reversed(range(case.rings.count)):
        group = x[:, :, index <= n]
        norm = group.flatten(1).norm(dim=1)[:, None, None]
        x[:, :, index <= n] = group * (1 - case.thresholds[n] / norm).clamp(min=0)
    return x.view_as(case.weight)


def shrunk_group_by_group(case: Case) -> Tensor:
    """A wrong method in a metric: the right order, and each group by itself shrunk exactly in the metric."""
    x, none = case.weight, torch.zeros_like(case.thresholds)
    for n in range(case.rings.count):
        alone = torch.where(torch.arange(case.rings.count) == n, case.thresholds, none)
        x = replace(case, weight=x, thresholds=alone).prox()
    return x
