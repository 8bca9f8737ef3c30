"""Folding of batch normalisations into the convolution or linear layer before them."""

from typing import Any

from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from loco_ext.fx.modules import bias_trains
from loco_ext.fx.operations import module_of
from loco_ext.sparsity.compaction.roles import CONVOLUTIONS, GraphInfo, Role, has_running_statistics
from loco_ext.sparsity.compaction.whole_filters import TRANSPOSED


def fold_norms(graph: fx.GraphModule) -> None:
    """Fold, in place, every batch normalisation that is the only reader of a layer, using its running statistics."""
    info = GraphInfo(graph)
    for node in list(graph.graph.nodes):
        kind = type(module_of(node))
        if kind not in (*CONVOLUTIONS, *TRANSPOSED, nn.Linear) or info.nodes[node].role is Role.OTHER:
            continue
        if info.is_called_again(node):  # with other inputs, whose results another normalisation may read
            continue
        while (found := info.norms_behind(node)) and has_running_statistics(module_of(found[0])):
            (behind,), layer = found, module_of(node)
            fuse: Any = fuse_linear_bn_eval if kind is nn.Linear else fuse_conv_bn_eval
            fused = fuse(layer, module_of(behind), **({"transpose": True} if kind in TRANSPOSED else {}))
            fused.bias.requires_grad_(bias_trains(layer))
            graph.set_submodule(str(node.target), fused)
            behind.replace_all_uses_with(node)
            graph.graph.erase_node(behind)
    graph.recompile()
