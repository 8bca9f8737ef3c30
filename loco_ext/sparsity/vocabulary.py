"""Layers, functions, methods and values that the graph of a saved model may contain, and the values as JSON.

Names from a file are only looked up in these tables.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from loco_ext.errors import UserError
from loco_ext.fx.branches import length, same_as_on_example
from loco_ext.ops.channels import layer_norm_with_constants, take_channels
from loco_ext.ops.mixed_conv import mixed_conv2d


class ModelFileError(UserError, ValueError):
    """A model that cannot be saved, or files that hold no model; the message names the node, module, tensor or file.

    Example:
        >>> from loco_ext import sparsity
        >>> try:
        ...     sparsity.load("nowhere")
        ... except sparsity.ModelFileError as error:
        ...     print(error)
        nowhere/manifest.json: cannot be read: No such file or directory
    """


# Modules without a forward of their own, except Sequential.
CONTAINERS = {kind.__name__: kind for kind in (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)}
_LAYERS_OF_SIZES = (  # for 1, 2 and 3 dimensions
    "Conv ConvTranspose BatchNorm InstanceNorm MaxPool AvgPool AdaptiveAvgPool AdaptiveMaxPool LPPool Dropout "
    "CircularPad ConstantPad ReflectionPad ReplicationPad ZeroPad"
)
_LAYERS = (
    "Linear Bilinear Identity Embedding GroupNorm LayerNorm RMSNorm LocalResponseNorm SyncBatchNorm Flatten Unflatten "
    "Fold Unfold PixelShuffle PixelUnshuffle ChannelShuffle CosineSimilarity Upsample UpsamplingNearest2d "
    "UpsamplingBilinear2d Dropout AlphaDropout FeatureAlphaDropout CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish "
    "Hardtanh LeakyReLU LogSigmoid LogSoftmax Mish PReLU RReLU ReLU ReLU6 SELU SiLU Sigmoid Softmax Softmax2d Softmin "
    "Softplus Softshrink Softsign Tanh Tanhshrink Threshold"
)
_OPERATORS = (
    "abs add and_ eq floordiv ge getitem gt iadd imul invert isub itruediv le lt matmul mod mul ne neg not_ or_ pos "
    "pow sub truediv"
)
# Operations on tensors: methods, and functions of torch and of torch.nn.functional, where these have the name.
_OPERATIONS = (
    "abs adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d "
    "adaptive_max_pool1d_with_indices adaptive_max_pool2d adaptive_max_pool2d_with_indices adaptive_max_pool3d "
    "adaptive_max_pool3d_with_indices add add_ addcmul alpha_dropout amax amin arange argmax avg_pool1d avg_pool2d "
    "avg_pool3d batch_norm bfloat16 bilinear bmm bool broadcast_to cat celu channel_shuffle chunk clamp clamp_ "
    "clamp_max clamp_min clip clip_ clone concat contiguous conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d cos cosine_similarity cumsum detach dim div div_ double dropout dropout1d dropout2d dropout3d "
    "einsum elu embedding eq erf exp expand expand_as feature_alpha_dropout flatten flip float floor fold full "
    "full_like ge gelu glu group_norm gt half hardshrink hardsigmoid hardswish hardtanh index_add index_add_ "
    "index_copy index_fill index_select instance_norm int interpolate layer_norm le leaky_relu lerp linear linspace "
    "local_response_norm log log_softmax logsigmoid logsumexp long lp_pool1d lp_pool2d lp_pool3d lt masked_fill matmul "
    "max max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices "
    "maximum mean min minimum mish movedim mul mul_ narrow ne neg new_ones new_zeros norm normalize numel ones "
    "ones_like pad permute pixel_shuffle pixel_unshuffle pow prelu prod rand_like randn_like reciprocal relu "
    "relu6 relu_ repeat repeat_interleave reshape rms_norm roll round rrelu rsqrt rsub scaled_dot_product_attention "
    "select selu sigmoid sigmoid_ sign silu sin size softmax softmin softplus softshrink softsign split sqrt square "
    "squeeze stack std sub sub_ sum swapaxes t tanh tanh_ tanhshrink threshold tile to transpose type_as unbind "
    "unflatten unfold unsqueeze upsample var view view_as where zeros zeros_like _assert"
)
GETATTR = "builtins.getattr"
ATTRIBUTES = frozenset(["shape", "ndim", "dtype", "device", "T", "mT"])  # attributes that getattr may read

_NAMES = [*_LAYERS.split(), *(f"{name}{size}d" for name in _LAYERS_OF_SIZES.split() for size in (1, 2, 3))]
LAYERS: dict[str, type[nn.Module]] = {name: getattr(nn, name) for name in _NAMES}
METHODS = frozenset(name for name in _OPERATIONS.split() if hasattr(torch.Tensor, name))


def _table(prefix: str, holder: Any, names: str) -> dict[str, Callable[..., Any]]:
    found = {name: getattr(holder, name, None) for name in names.split()}
    return {f"{prefix}.{name}": value for name, value in found.items() if callable(value)}


FUNCTIONS: dict[str, Callable[..., Any]] = {
    GETATTR: getattr,
    "math.prod": math.prod,
    **_table("operator", operator, _OPERATORS),
    **_table("torch", torch, _OPERATIONS),
    **_table("torch.nn.functional", F, _OPERATIONS),
    **_table("torch.Tensor", torch.Tensor, _OPERATIONS),
    "torch.linalg.vector_norm": torch.linalg.vector_norm,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "loco_ext.length": length,
    "loco_ext.same_as_on_example": same_as_on_example,
    "loco_ext.take_channels": take_channels,
    "loco_ext.mixed_conv2d": mixed_conv2d,
    "loco_ext.layer_norm_with_constants": layer_norm_with_constants,
}
FUNCTION_NAMES = {function: name for name, function in reversed(FUNCTIONS.items())}

DTYPES = {str(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)}
MEMORY_FORMATS = {str(found): found for found in vars(torch).values() if isinstance(found, torch.memory_format)}


def encode(value: Any) -> Any:
    """Return a value from a graph or a constructor as JSON, with nodes by name.

    Raises:
        ModelFileError: the value has a type that :func:`decode` does not know.

    Example:
        >>> import torch
        >>> encode([(1, float("inf")), torch.float16])
        [{'tuple': [1, {'float': 'inf'}]}, {'dtype': 'torch.float16'}]
    """
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) in (list, fx.immutable_collections.immutable_list):
        return [encode(entry) for entry in value]
    if type(value) in _PLAIN:
        tag, content = _PLAIN[type(value)](value)
        return {tag: content}
    raise ModelFileError(f"{value!r} of type {type(value).__qualname__} cannot be saved")


def _pairs(value: Mapping[Any, Any]) -> tuple[str, Any]:
    return "dict", [[encode(key), encode(entry)] for key, entry in value.items()]


_PLAIN: dict[type, Callable[[Any], tuple[str, Any]]] = {
    fx.Node: lambda value: ("node", value.name),
    float: lambda value: ("float", repr(value)),
    tuple: lambda value: ("tuple", [encode(entry) for entry in value]),
    torch.Size: lambda value: ("tuple", list(value)),
    dict: _pairs,
    fx.immutable_collections.immutable_dict: _pairs,
    slice: lambda value: ("slice", [encode(value.start), encode(value.stop), encode(value.step)]),
    type(...): lambda value: ("ellipsis", None),
    torch.dtype: lambda value: ("dtype", str(value)),
    torch.memory_format: lambda value: ("memory_format", str(value)),
    torch.device: lambda value: ("device", str(value)),
}


def decode(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    """Return the value that was given to :func:`encode`.

    Args:
        nodes: the nodes that a value may refer to, by name.

    Raises:
        ModelFileError: the value is not a result of encode, or a name is in no table.
    """
    if isinstance(value, list):
        return [decode(entry, nodes) for entry in value]
    if not isinstance(value, dict):
        return value
    try:
        ((tag, content),) = value.items()
        if tag in _TABLES:
            return _TABLES[tag][content]
        if tag == "node":
            return nodes[content]
        if tag == "float":
            return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[content]
        if tag == "device":
            return torch.device(str(content))
        if tag == "dict":
            return {decode(key, nodes): decode(entry, nodes) for key, entry in content}
        entries = [decode(entry, nodes) for entry in content]
        if tag == "slice":
            start, stop, step = entries
            return slice(start, stop, step)
        return {"tuple": tuple}[tag](entries)
    except ModelFileError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ModelFileError(f"{value!r} is no value that a graph may hold") from error


_TABLES: dict[str, Mapping[Any, Any]] = {"dtype": DTYPES, "memory_format": MEMORY_FORMATS, "ellipsis": {None: ...}}
