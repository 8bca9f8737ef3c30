"""Peers of the prox of nested rings for its benchmarks: eager and compiled PyTorch, SPAMS, torchao.

All support Euclidean norms, SPAMS also the maximum norm; none supports a metric. One-time work for a weight, such as
SPAMS' order of the weights, is part of the construction of a candidate and not timed.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot


@dataclass(frozen=True)
class Problem:
    """A weight, the ring of each of its taps, one threshold for each group of rings, and the norm of groups."""

    weight: Tensor  # [C_out, channels, *taps]; a call may change it
    rings: list[int]
    thresholds: Tensor  # float64 [groups]
    norm: str

    @property
    def count(self) -> int:
        return len(self.thresholds)


@dataclass(frozen=True)
class Candidate:
    """The timed call, and a function that converts its result to a tensor like the weight."""

    call: Callable[[], Any]
    result: Callable[[Any], Tensor] = lambda result: result


def factor(norm: Tensor, threshold: Tensor) -> Tensor:
    """Return the factor by which a group of this norm is multiplied."""
    return torch.where(norm <= threshold, 0.0, 1 - threshold / norm)


def by_groups(weight: Tensor, groups: list[Tensor], thresholds: Tensor) -> Tensor:
    """Compute the prox literally: each group in turn is extracted, measured and written back scaled."""
    x = weight.flatten(2).clone()
    for taps, threshold in zip(groups, thresholds, strict=True):
        group = x[:, :, taps]
        norm = torch.linalg.vector_norm(group, dim=(1, 2), keepdim=True)
        x[:, :, taps] = group * factor(norm, threshold)
    return x.view_as(weight)


def by_masks(weight: Tensor, masks: list[Tensor], thresholds: Tensor) -> Tensor:
    """Compute the same as :func:`by_groups` without extracting groups: masks of ones and zeros represent them."""
    x = weight
    for mask, threshold in zip(masks, thresholds, strict=True):
        norm = torch.linalg.vector_norm(x * mask, dim=(1, 2, 3), keepdim=True)
        x = x * torch.where(mask, factor(norm, threshold), 1.0)
    return x


def by_ring_sums(weight: Tensor, rings: Tensor, members: Tensor, thresholds: Tensor) -> Tensor:
    """Compute the prox by the fastest eager code that we know: a sum of squares for each ring, scalars, one scaling.

    ``rings``: ring of each tap, in the kernel's shape; ``members``: [taps, rings], 1 where a tap is in a ring.
    """
    norms = (weight.square().sum(1).flatten(1) @ members).sqrt()  # [C_out, rings]
    inner = torch.zeros_like(norms[:, 0])
    factors = []
    for ring, threshold in zip(norms.unbind(1), thresholds, strict=True):
        group = torch.hypot(inner, ring)
        factors.append(factor(group, threshold))
        inner = factors[-1] * group
    of_ring = torch.stack(factors, 1).flip(1).cumprod(1).flip(1)
    return weight * of_ring[:, rings][:, None]


def torch_groups(problem: Problem) -> Candidate:
    index, thresholds = _index(problem), problem.thresholds.to(problem.weight)
    groups = [(index.flatten() <= n).nonzero().flatten() for n in range(problem.count)]
    return Candidate(functools.partial(by_groups, problem.weight, groups, thresholds))


def torch_masks(problem: Problem) -> Candidate:
    index, thresholds = _index(problem), problem.thresholds.to(problem.weight)
    masks = [index <= n for n in range(problem.count)]
    return Candidate(functools.partial(by_masks, problem.weight, masks, thresholds))


def torch_rings(problem: Problem, function: Callable[..., Tensor] = by_ring_sums) -> Candidate:
    index, thresholds = _index(problem), problem.thresholds.to(problem.weight)
    members = one_hot(index.flatten(), problem.count).to(problem.weight)
    return Candidate(functools.partial(function, problem.weight, index, members, thresholds))


def torch_compile(problem: Problem) -> Candidate:
    return torch_rings(problem, torch.compile(by_ring_sums))


def _index(problem: Problem) -> Tensor:
    return torch.tensor(problem.rings, device=problem.weight.device).view(problem.weight.shape[2:])


def spams(problem: Problem) -> Candidate:
    """Return SPAMS' proximalTree, a column per filter. It needs the root's variables first: from the centre out."""
    import numpy as np
    from scipy import sparse

    module = importlib.import_module("spams")
    filters, channels = problem.weight.shape[:2]
    order = np.argsort(-np.asarray(problem.rings), kind="stable")
    by_tap = problem.weight.flatten(2).numpy()[:, :, order].transpose(2, 1, 0)
    own = np.bincount(problem.rings)[::-1].astype(np.int32) * channels
    tree = {
        "eta_g": problem.thresholds.numpy()[::-1].astype(by_tap.dtype),
        "groups": sparse.csc_matrix(np.asfortranarray(np.eye(len(own), k=-1, dtype=bool))),  # each in the one before
        "own_variables": (np.cumsum(own) - own).astype(np.int32),
        "N_own_variables": own.astype(np.int32),
    }
    options = {"numThreads": torch.get_num_threads(), "lambda1": 1.0, "regul": f"tree-{problem.norm}"}
    columns = np.asfortranarray(by_tap.reshape(-1, filters))

    def result(found: Any) -> Tensor:
        x = torch.empty_like(problem.weight).flatten(2)
        x[:, :, order] = torch.from_numpy(found.reshape(-1, channels, filters)).movedim((0, 1, 2), (2, 1, 0))
        return x.view_as(problem.weight)

    return Candidate(lambda: module.proximalTree(columns, tree, False, **options), result)


def torchao(problem: Problem) -> Candidate:
    """Return PAT's group lasso, one group per filter; it works in place, counts zeros and measures the remainder."""
    executor = importlib.import_module("torchao.prototype.pat.optim.prox_executor")
    optim, group = (importlib.import_module(f"torchao.prototype.pat.{part}") for part in ("optim", "group"))
    (threshold,) = problem.thresholds.tolist()
    prox = optim.ProxGroupLasso(threshold / problem.weight[0].numel() ** 0.5)
    options = {"gamma": 1.0, "gamma_index_slope": 0.0, "disable_vmap": False, "is_svd_grouper": False}

    def call() -> Tensor:
        executor.apply_prox(group.Dim0Grouper(problem.weight), prox, problem.weight, **options)
        return problem.weight

    return Candidate(call)


PEERS: dict[str, Callable[[Problem], Candidate]] = {
    "torch_groups": torch_groups,
    "torch_masks": torch_masks,
    "torch_rings": torch_rings,
    "torch_compile": torch_compile,
    "spams": spams,
    "torchao": torchao,
}


def not_installed() -> dict[str, str]:
    """Return the peers whose package is missing, and the reason."""
    return {name: f"{name} is not installed" for name in ("spams", "torchao") if find_spec(name) is None}
