"""Report on a network that :class:`Rewriter` has built."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import Any

from torch import Tensor, fx

from loco_ext.fx.operations import module_of
from loco_ext.ops.channels import layer_norm_with_constants
from loco_ext.sparsity.compaction.channels import Channels
from loco_ext.sparsity.compaction.compaction_report import LayerReport, Report
from loco_ext.sparsity.compaction.constant_channels import ORIGINAL_WEIGHT
from loco_ext.sparsity.compaction.convolution import Bucket, boxes, taps
from loco_ext.sparsity.compaction.graph import MODULE
from loco_ext.sparsity.compaction.macs import samples_in
from loco_ext.sparsity.compaction.rewrite import Rewriter
from loco_ext.sparsity.compaction.roles import Role, is_depthwise, stored
from loco_ext.sparsity.compaction.whole_filters import TRANSPOSED, filter_weights


def describe(channels: Channels, rewriter: Rewriter) -> Report:
    """Return a report on the result for every layer, and on why something was kept."""
    report, calls = Report(), defaultdict[str, list[fx.Node]](list)
    samples = samples_of(channels.graph)
    for node, info in channels.info.nodes.items():
        module = module_of(node)
        depthwise = module is not None and is_depthwise(module)
        if info.role is Role.CONVOLUTION or (info.role is Role.PER_CHANNEL and depthwise):
            calls[str(node.target)].append(node)
    for name, nodes in calls.items():
        module = module_of(nodes[0])
        weight = filter_weights(module).detach()
        pixels = {node: pixels_of(node, module, samples) for node in nodes}
        left = [pixels[node] for node in nodes if node in rewriter.left]
        after, buckets = rewriter.layers[name] if left else (None, ())
        before = nodes[0].meta.get(ORIGINAL_WEIGHT, weight)
        layer = describe_layer(name, before, sum(pixels.values()), after, sum(left), buckets)
        layer.kept = _why_kept(channels, nodes[0], weight)
        report.layers.append(layer)
    report.notes = {name: f"all channels are kept: {why}" for name, why in kept_channels(channels).items()}
    return report


def kept_channels(channels: Channels) -> dict[str, str]:
    """Return why all channels that an operation reads and returns are kept, by the name of the module or operation."""
    info = channels.info
    return {
        str(node.target) if node.op == "call_module" else node.meta.get(MODULE, node.name): info.why_kept(node)
        for node, each in info.nodes.items()
        if each.role is Role.OTHER and each.sources and not _is_no_layer(node) and stored(node) is None
    }


def samples_of(graph: fx.GraphModule) -> int:
    """Return the number of samples of the example on which the graph's shapes were recorded."""
    arguments = (node for node in graph.graph.nodes if node.op == "placeholder")
    return samples_in([node.meta["shape"] for node in arguments if "shape" in node.meta])


def pixels_of(node: fx.Node, module: Any, samples: int) -> Fraction:
    """Return the number of places, for one sample, where a layer multiplies by all of its weights."""
    image = node.all_input_nodes[0] if type(module) in TRANSPOSED else node
    return Fraction(prod(image.meta["shape"]), len(module.weight) * samples)


def _is_no_layer(node: fx.Node) -> bool:
    """Return whether the report omits the node: it has no channels to remove, or they have been removed."""
    if "shape" not in node.meta and all(source.op == "placeholder" for source in node.all_input_nodes):
        return True  # it reads a size of the model's input
    constructs = isinstance(node.target, type)  # the model's result
    return node.op in ("placeholder", "output", "get_attr") or constructs or node.target is layer_norm_with_constants


def describe_layer(
    name: str,
    before: Tensor,
    pixels: Fraction | int,
    after: Tensor | None,
    left: Fraction | int,
    buckets: Sequence[Bucket],
) -> LayerReport:
    """Return the report on one layer with these weights before and after, ``(C_out, C_in/groups, *kernel_size)``.

    Args:
        pixels: number of output pixels of one sample, in all calls; a fraction where several samples share them.
        after: None if the layer was removed.
        left: number of output pixels of one sample, in the calls that the smaller network makes.
        buckets: how the layer is computed now.
    """
    width = 0 if after is None else int((after != 0).transpose(0, 1).flatten(1).any(1).sum())
    found = [] if after is None else boxes(_with_axis(after))
    sizes = Counter("0" if box is None else _size([b - a for a, b in box]) for box in found)
    areas = sum(taps(box) for box in found if box is not None)
    per_filter = 0 if after is None else after.shape[1]
    return LayerReport(
        name=name,
        filters_before=len(before),
        filters_after=sum(box is not None for box in found),
        channels_before=before.shape[1],
        channels_after=width,
        kernel_size=_size(before.shape[2:]),
        sizes=dict(sorted(sizes.items(), reverse=True)),
        convolutions=[(_size([b - a for a, b in bucket.box]), len(bucket.filters)) for bucket in buckets],
        identity_filters=_identities(_with_axis(before)),
        macs_before=round(pixels * before.numel()),
        macs_after=round(left * areas * width),
        macs_executed=round(left * per_filter * sum(len(b.filters) * taps(b.box) for b in buckets)),
    )


def _size(lengths: Sequence[int]) -> str:
    return "x".join(map(str, lengths)) or "1"


def _with_axis(weight: Tensor) -> Tensor:
    return weight if weight.dim() > 2 else weight[..., None]


def _identities(weight: Tensor) -> int:
    """Return the number of filters whose only non-zero weight is at the centre (eq. 24 of the draft)."""
    live = weight != 0
    place: Any = (..., *((size - 1) // 2 for size in weight.shape[2:]))
    centre = live[place]  # [C_out, C_in/groups]
    return int(((live.flatten(1).sum(1) == 1) & (centre.sum(1) == 1)).sum())


def _why_kept(channels: Channels, node: fx.Node, weight: Tensor) -> str | None:
    """Return why filters without weights were kept."""
    value = channels.values[node]
    dead = ~(weight != 0).flatten(1).any(1).cpu().numpy() & channels.sets.needed(value.ids)
    reasons = Counter(channels.sets.reason(one) for one in value.ids[dead].tolist())
    return "; ".join(f"{count} dead filters: {reason}" for reason, count in reasons.items()) or None
