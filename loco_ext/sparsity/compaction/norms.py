"""Folding of batch normalisations into the convolution or linear layer before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from loco_ext.sparsity.compaction.places import put
from loco_ext.sparsity.compaction.roles import BATCH_NORMS, CONVOLUTIONS, Reader, Role


def fold_norms(traced: fx.GraphModule) -> None:
    """Fold, in place, every batch normalisation that is the only reader of a layer, using its running statistics."""
    reader = Reader(traced)
    for node in list(traced.graph.nodes):
        norm = reader.module(node)
        if type(norm) not in BATCH_NORMS or norm.running_mean is None or reader.read(node).role is not Role.PER_CHANNEL:
            continue
        (source,) = node.all_input_nodes
        layer = reader.module(source)
        known = reader.read(source).role in (Role.CONVOLUTION, Role.PER_CHANNEL)
        if not known or type(layer) not in (*CONVOLUTIONS, nn.Linear) or len(source.users) > 1:
            continue
        fuse = cast(Callable[..., nn.Module], fuse_linear_bn_eval if type(layer) is nn.Linear else fuse_conv_bn_eval)
        put(traced, str(source.target), fuse(layer, norm))
        node.replace_all_uses_with(source)
        traced.graph.erase_node(node)
    traced.recompile()
