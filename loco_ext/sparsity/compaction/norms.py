"""Folding of batch normalisations into the convolution or linear layer before them."""

from typing import Any

from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from loco_ext.fx.modules import bias_trains, put
from loco_ext.sparsity.compaction.roles import BATCH_NORMS, CONVOLUTIONS, GraphInfo, Role


def fold_norms(graph: fx.GraphModule) -> None:
    """Fold, in place, every batch normalisation that is the only reader of a layer, using its running statistics."""
    info = GraphInfo(graph)
    for node in list(graph.graph.nodes):
        norm = info.module(node)
        if type(norm) not in BATCH_NORMS or norm.running_mean is None or info.nodes[node].role is not Role.PER_CHANNEL:
            continue
        (source,) = node.all_input_nodes
        known = info.nodes[source].role in (Role.CONVOLUTION, Role.PER_CHANNEL) and source.op == "call_module"
        layer: Any = graph.get_submodule(str(source.target)) if known else None
        if type(layer) not in (*CONVOLUTIONS, nn.Linear) or len(source.users) > 1:
            continue
        fused = fuse_linear_bn_eval(layer, norm) if type(layer) is nn.Linear else fuse_conv_bn_eval(layer, norm)
        fused.bias.requires_grad_(bias_trains(layer))
        put(graph, str(source.target), fused)
        node.replace_all_uses_with(source)
        graph.graph.erase_node(node)
    graph.recompile()
