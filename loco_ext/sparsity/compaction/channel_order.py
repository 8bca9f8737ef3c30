"""Streams: channels that several layers write, as in a residual network, and that may have any order.

One of the layers can then keep its filters in the order in which it computes them; the others follow.
"""

from collections import defaultdict
from math import prod

from torch import fx

from loco_ext.sparsity.compaction.channels import Channels

Stream = tuple[int, ...]  # the class of each channel


def leaders(channels: Channels) -> list[fx.Node]:
    """Return, for each stream whose channels may have any order, the convolution with the most work."""
    streams = {node: channels.classes(node) for node in channels.values}
    found: dict[int, Stream] = {}
    mixed: set[int] = set()  # classes that are in several streams
    for stream in dict.fromkeys(streams.values()):
        mixed.update(channel for channel in stream if found.setdefault(channel, stream) is not stream)
    writers: dict[Stream, list[fx.Node]] = defaultdict(list)
    for node, layer in channels.layers.items():
        if layer.groups == 1 and layer.module.weight.dim() > 2 and not channels.free(node):
            writers[streams[node]].append(node)
    immovable = channels.fixed() | mixed

    def movable(stream: Stream) -> bool:
        """Return whether all values with one of the channels have each of them once, and every reader can follow."""
        return len(set(stream)) == len(stream) and immovable.isdisjoint(stream)

    def work(node: fx.Node) -> int:
        return prod(node.meta["shape"][2:]) * int(channels.layers[node].module.weight.numel())

    return [max(nodes, key=work) for stream, nodes in writers.items() if movable(stream)]
