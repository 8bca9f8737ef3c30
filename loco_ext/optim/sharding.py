"""Stepping DTensor parameters (FSDP2, tensor parallelism) shard by shard.

The update of a weight needs only its own gradient and states, so each rank steps its local tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from loco_ext.ops.penalties import OfStep


def local_tensors(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[list[Tensor]],
    maps: Sequence[Tensor | None],
    penalties: Sequence[OfStep | None],
) -> None:
    """Replace DTensors in the lists by their local shards; gradients take their parameter's placement first.

    Raises:
        NotImplementedError: if a parameter with a decay map is sharded along an axis of its kernel or its blocks, if
            one with a penalty is sharded along any axis but its output channels, or if one with a penalty on all
            filters of a layer together is sharded at all.
    """
    from torch.distributed.tensor import DTensor

    for i, param in enumerate(params):
        if not isinstance(param, DTensor):
            continue
        _check_map(i, param, maps[i])
        _check_penalty(i, param, penalties[i])
        params[i] = param.to_local()
        for tensors in (grads, *states):
            if tensors:
                tensors[i] = _local(tensors[i], param)


def replicated_maps(param: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which a DTensor parameter may be combined with plain tensors, which every rank has whole."""
    if type(param) in (Tensor, Parameter):
        return nullcontext()
    from torch.distributed.tensor.experimental import implicit_replication

    return implicit_replication()


def _local(tensor: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.placements != like.placements and tensor.dim() == like.dim() and tensor.dim() > 0:
        tensor = tensor.redistribute(like.device_mesh, like.placements)
    return tensor.to_local()


def _check_map(index: int, param: Any, decay_map: Tensor | None) -> None:
    from torch.distributed.tensor import Shard

    if decay_map is None:
        return
    missing = param.dim() - decay_map.dim()  # leading axes that the map lacks; it broadcasts along axes of size 1, too
    for placement in param.placements:
        axis = placement.dim % param.dim() - missing if isinstance(placement, Shard) else -1
        if axis >= 0 and decay_map.shape[axis] > 1:
            raise NotImplementedError(
                f"params[{index}]: expected sharding along channels for a parameter with a decay map, got {placement}"
            )


def _check_penalty(index: int, param: Any, penalty: OfStep | None) -> None:
    from torch.distributed.tensor import Shard

    if penalty is None:
        return
    for placement in param.placements:
        if isinstance(placement, Shard) and (penalty.of_layer or placement.dim % param.dim() != 0):
            wanted = "no sharding" if penalty.of_layer else "sharding along output channels"
            raise NotImplementedError(
                f"params[{index}]: expected {wanted} for a parameter with this penalty, got {placement}"
            )
