"""Stepping DTensor parameters (FSDP2, tensor parallelism) shard by shard.

The update of a weight needs only its own gradient and states, so each rank steps its local tensors.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from loco_ext.ops.penalties import LayerPenalty, OfStep


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
        _check_placements(i, param, maps[i], penalties[i])
        params[i] = param.to_local()
        for tensors in (grads, *states):
            if tensors:
                tensors[i] = _local(tensors[i], param)


def is_sharded(param: Tensor) -> bool:
    """Return whether a parameter is a DTensor; other subclasses of Parameter are ordinary ones."""
    if type(param) in (Tensor, Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(param, DTensor)


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


def _check_placements(index: int, param: Any, decay_map: Tensor | None, penalty: OfStep | None) -> None:
    # The map's sizes along the parameter's axes: it lacks the leading ones, along which it broadcasts.
    sizes = () if decay_map is None else (*[1] * (param.dim() - decay_map.dim()), *decay_map.shape)
    for placement in param.placements:
        if not hasattr(placement, "dim"):  # no shard, neither a Shard nor one that strides over two meshes
            continue
        axis = placement.dim % param.dim()
        wanted = None
        if decay_map is not None and sizes[axis] > 1:
            wanted = "sharding along channels for a parameter with a decay map"
        elif isinstance(penalty, LayerPenalty) or (penalty is not None and penalty.joint):
            wanted = "no sharding for a parameter with this penalty"
        elif penalty is not None and axis != 0:
            wanted = "sharding along output channels for a parameter with this penalty"
        if wanted is not None:
            raise NotImplementedError(f"params[{index}]: expected {wanted}, got {placement}")
