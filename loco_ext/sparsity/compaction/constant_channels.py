"""Layer normalisations over channels that no longer read those channels that are constant everywhere.

The result of a normalisation for a constant channel is a linear combination of two features that all constant channels
share. Layers that are linear in their input read these features instead of the channels; see
:func:`layer_norm_with_constants`.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from loco_ext.fx.modules import bias_trains, paddings, unused_name
from loco_ext.fx.operations import module_of
from loco_ext.ops.channels import features_beside, layer_norm_with_constants, take_channels
from loco_ext.sparsity.compaction.channels import Channels, analyse
from loco_ext.sparsity.compaction.constants import Floats
from loco_ext.sparsity.compaction.disjoint_set import Integers
from loco_ext.sparsity.compaction.graph import record
from loco_ext.sparsity.compaction.roles import Role, has_channels, is_depthwise
from loco_ext.sparsity.compaction.whole_filters import TRANSPOSED

ORIGINAL_WEIGHT = "original_weight"  # key in the meta of a layer's node: the weight that the layer has in the model


def without_constant_channels(model: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule | None:
    """Return a copy of the graph in which no layer normalisation reads constant channels; None if nothing changes.

    Depthwise convolutions before such normalisations compute only the other channels. A normalisation is kept if one of
    its readers is not linear or pads it with zeros, or if all its channels are constant.
    """
    if not any(type(module) is nn.LayerNorm for module in model.modules()):
        return None
    result = copy.deepcopy(model)
    channels = analyse(result)
    norms = [node for node in channels.values if _is_over_channels(channels, node)]
    changed = [_narrow(result, channels, node) for node in norms]
    if not any(changed):
        return None
    result.recompile()
    record(result, example_inputs)
    return result


def _is_over_channels(channels: Channels, node: fx.Node) -> bool:
    """Return whether the node is a layer normalisation of channels along the last axis that may be rewritten."""
    norm = module_of(node)
    if type(norm) is not nn.LayerNorm or len(node.args) != 1 or node.kwargs:
        return False
    if channels.info.why_opaque(node) is not None or len(norm.normalized_shape) != 1:
        return False
    (source,) = node.all_input_nodes
    return source in channels.values and channels.info.axis(source) == len(source.meta["shape"]) - 1


def _narrow(network: fx.GraphModule, channels: Channels, node: fx.Node) -> bool:
    """Make the normalisation read only the channels that vary; return False if that does not reduce the features."""
    (source,) = node.all_input_nodes
    value, readers = channels.values[source], _readers(channels, node)
    live, dead = np.flatnonzero(value.varies), np.flatnonzero(~value.varies)
    if readers is None or not len(live) or not len(dead):
        return False
    numbers = value.constants[dead]
    mean = numbers[0] + (numbers - numbers[0]).mean()  # exact if all are equal
    offsets = numbers - mean
    variance = float(np.square(offsets).mean())
    if len(dead) <= features_beside(variance):
        return False
    norm = module_of(node)
    for reader in readers:
        _read_features(reader, norm, live, dead, offsets if variance else None)
    taken = _taken(network, channels, source, live)
    with network.graph.inserting_before(node):
        features = network.graph.call_function(
            layer_norm_with_constants, (taken, len(dead), float(mean), variance, norm.eps)
        )
    node.replace_all_uses_with(features)
    network.graph.erase_node(node)
    return True


def _readers(channels: Channels, node: fx.Node) -> list[fx.Node] | None:
    """Return the layers that read the node's channels, along any axis; None if something else reads them."""
    found = []
    for user in node.users:
        role = channels.role(user)
        if role is Role.MOVE:
            behind = _readers(channels, user)
            if behind is None:
                return None
            found += behind
        elif role is Role.CONVOLUTION and _is_linear_everywhere(channels, user):
            found.append(user)
        else:
            return None
    return found


def _is_linear_everywhere(channels: Channels, node: fx.Node) -> bool:
    """Return whether each output is the same sum of the same features plus a bias, at borders as well."""
    module = module_of(node)
    if channels.info.is_called_again(node):  # on other features as well
        return False
    if isinstance(module, nn.Linear):
        return True
    if type(module) in TRANSPOSED:  # reads zeros between pixels
        return False
    pads = module.padding_mode == "zeros" and any(p for axis in paddings(module) for p in axis)
    return module.groups == 1 and not pads


def _read_features(node: fx.Node, norm: nn.LayerNorm, live: Integers, dead: Integers, offsets: Floats | None) -> None:
    """Replace the layer's weights for the channels by weights for the features.

    Args:
        offsets: differences of the constants from their mean; None if all are equal.
    """
    module = module_of(node)
    whole = module.weight.detach()
    node.meta[ORIGINAL_WEIGHT] = whole
    weight = whole.double()  # [C_out, C, *kernel_size]
    shape = [1, -1, *[1] * (weight.dim() - 2)]
    bias = None if module.bias is None else module.bias.detach().double()
    if norm.bias is not None:
        added = (weight * norm.bias.detach().double().reshape(shape)).flatten(1).sum(1)
        bias = added if bias is None else bias + added
    if norm.weight is not None:
        weight = weight * norm.weight.detach().double().reshape(shape)
    share = len(dead) / (len(dead) + len(live))
    kept, gone = weight[:, live], weight[:, dead]
    columns = [kept, share * kept.sum(1, keepdim=True) - (1 - share) * gone.sum(1, keepdim=True)]
    if offsets is not None:
        columns.append((gone * torch.from_numpy(offsets).to(gone.device).reshape(shape)).sum(1, keepdim=True))
    if bias is not None:
        module.bias = nn.Parameter(bias.to(whole.dtype), requires_grad=bias_trains(module))
    trains = module.weight.requires_grad
    module.weight = nn.Parameter(torch.cat(columns, 1).to(whole.dtype), requires_grad=trains)
    setattr(module, "in_features" if isinstance(module, nn.Linear) else "in_channels", module.weight.shape[1])


def _taken(network: fx.GraphModule, channels: Channels, source: fx.Node, live: Integers) -> fx.Node:
    """Return the varying channels of ``source``; a depthwise convolution that only feeds them computes no others."""
    layer = source
    while len(layer.users) == 1 and _passes_on(channels, layer):
        (layer,) = channels.sources(layer)
    module = module_of(layer)
    if channels.role(layer) is Role.PER_CHANNEL and is_depthwise(module) and len(layer.users) == 1:
        layer.meta[ORIGINAL_WEIGHT] = module.weight.detach()
        for name in ("weight", "bias"):
            whole = getattr(module, name)
            if whole is not None:
                setattr(module, name, nn.Parameter(whole.detach()[live], requires_grad=whole.requires_grad))
        module.in_channels = module.out_channels = module.groups = len(live)
        (read,) = channels.sources(layer)
        layer.replace_input_with(read, _take(network, channels, read, live, before=layer))
        return source
    return _take(network, channels, source, live, before=source.next)


def _passes_on(channels: Channels, node: fx.Node) -> bool:
    """Return whether the node treats all channels the same, whatever their number, and has nothing for each."""
    role, module = channels.role(node), module_of(node)
    for_each = channels.info.by_channel(node) if module is None else has_channels(module)
    return not for_each and role in (Role.MOVE, Role.PER_CHANNEL)


def _take(network: fx.GraphModule, channels: Channels, source: fx.Node, live: Integers, before: fx.Node) -> fx.Node:
    name = unused_name(network, f"{source.name}_live")
    network.register_buffer(name, torch.from_numpy(live).to(source.meta["device"]))
    with network.graph.inserting_before(before):
        index = network.graph.get_attr(name)
        return network.graph.call_function(take_channels, (source, index, channels.info.axis(source)))
