"""Choice of how to compute a convolution: by counting MACs, or by timing on this machine."""

import logging
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from loco_ext.fx.modules import device_of, paddings
from loco_ext.ops import backends, mixed_conv
from loco_ext.ops.memory_format import FORMATS
from loco_ext.sparsity.compaction.convolution import Bucket, Convolution, by_size, inverse_order, join, standalone
from loco_ext.sparsity.compaction.whole_filters import filter_weights

_log = logging.getLogger(__name__)
_ORDER = random.Random(0)  # order of timed calls; leaves the state of the global generator unchanged
_MOST_SIZES = 5  # most kernel sizes that have a convolution of torch's each
_MEASURED: dict[Hashable, float] = {}  # seconds, by the result of _name
SHORT_TIMING, LONG_TIMING = 0.6, 2.0  # seconds spent on comparing networks
_SECONDS_PER_WAY = 0.02  # seconds spent on timing a way
_MARGIN = 0.97  # another way must take less than this part of the time of one convolution


def fewest_macs(convolution: Convolution, kind: Mapping[str, Any], free: bool) -> list[Bucket]:
    """Return one convolution for each kernel size."""
    return by_size(convolution)


def as_it_is(convolution: Convolution, kind: Mapping[str, Any], free: bool) -> list[Bucket]:
    """Return the convolution with all its taps."""
    return [Bucket.whole(convolution.weight)]


def fastest(convolution: Convolution, kind: Mapping[str, Any], free: bool) -> list[Bucket]:
    """Return the fastest way to compute the layer on inputs of the example's shape, dtype and memory format.

    One convolution of torch's is compared with one for each kernel size, of which the rarest join the next, and with
    :func:`loco_ext.ops.mixed_conv2d` if its kernels support the layer.
    """
    buckets = by_size(convolution, most=_MOST_SIZES)
    ways = [[join(buckets)]]
    if len(buckets) > 1:
        ways.append(buckets)
    if takes_mixed(convolution, kind):
        ways.append(all_at_once(convolution))
    if len(ways) == 1:
        return ways[0]
    first, *others = _times(convolution, ways, kind, free)
    least = min(others)
    return ways[1 + others.index(least)] if least < _MARGIN * first else ways[0]


def all_at_once(convolution: Convolution) -> list[Bucket]:
    """Return the filters of each size, for :func:`loco_ext.ops.mixed_conv2d`."""
    return [replace(bucket, mixed=True) for bucket in by_size(convolution, dead_apart=True)]


def takes_mixed(convolution: Convolution, kind: Mapping[str, Any]) -> bool:
    """Return whether compiled kernels can compute the convolution with each filter at its own size."""
    plain = convolution.axes == 2 and convolution.groups == 1 and convolution.module.padding_mode == "zeros"
    images = len(kind["shape"]) == 4 and kind["dtype"] in mixed_conv.DTYPES
    return plain and images and backends.missing("mixed_conv", "native", kind["device"].type) is None


def latencies(networks: Sequence[nn.Module], inputs: Sequence[Any], budget: float) -> list[float]:
    """Return the median seconds of a call of each network; calls alternate for about ``budget`` seconds in all."""
    _log.info("timing %d versions of the network, %g seconds", len(networks), budget)
    calls = [partial(network, *inputs) for network in networks]
    return [statistics.median(values) for values in _samples(calls, device_of(networks[0]), budget)]


def seconds_of(convolution: Convolution, kind: Mapping[str, Any]) -> float:
    """Return the seconds that a convolution takes on inputs like the example's, the least of several timings."""
    return _times(convolution, [as_it_is(convolution, kind, free=True)], kind, free=True)[0]


def seconds_of_layer(layer: Any, kind: Mapping[str, Any]) -> float:
    """Return the seconds that a linear layer or a transposed convolution takes on inputs like the example's.

    The least of several timings.
    """
    shape = list(kind["shape"])
    shape[-1 if isinstance(layer, nn.Linear) else 1] = filter_weights(layer).shape[1]
    x = _random(shape, kind)
    ((*seconds,),) = _samples([partial(layer, x)], x.device, _SECONDS_PER_WAY)
    return min(seconds)


def clear_timings() -> None:
    """Discard all timings, as other work on the machine may have changed."""
    _MEASURED.clear()


def _times(
    convolution: Convolution, ways: Sequence[Sequence[Bucket]], kind: Mapping[str, Any], free: bool
) -> list[float]:
    """Return the least seconds of each way; other work on the machine affects the minimum less than the median.

    Timings are shared between layers of one shape and between versions of one network.
    """
    names = [_name(convolution, way, kind, free) for way in ways]
    fresh = {name: way for name, way in zip(names, ways, strict=True) if name not in _MEASURED}
    if fresh:
        x = _random(_shape(kind, convolution), kind)
        calls = [partial(standalone(convolution, way, free), x) for way in fresh.values()]
        _log.info("timing %d ways to compute %s", len(calls), _description(convolution, x))
        times = [min(values) for values in _samples(calls, x.device, _SECONDS_PER_WAY * len(calls))]
        _MEASURED.update(zip(fresh, times, strict=True))
    return [_MEASURED[name] for name in names]


def _description(convolution: Convolution, x: Tensor) -> str:
    kernel = "x".join(map(str, convolution.weight.shape[2:]))
    return f"{len(convolution.weight)} filters of {kernel} on inputs of {'x'.join(map(str, x.shape))}"


def _name(convolution: Convolution, way: Sequence[Bucket], kind: Mapping[str, Any], free: bool) -> Hashable:
    """Return a key of everything that a way's time depends on."""
    module = convolution.module
    layer = module.stride, paddings(module), module.dilation, module.padding_mode, convolution.groups
    buckets = tuple((len(bucket.filters), bucket.box, bucket.mixed) for bucket in way)
    in_order = free or inverse_order(way, convolution.weight.device) is None
    weight = tuple(convolution.weight.shape[2:]), convolution.bias is None, convolution.channels_last
    example = _shape(kind, convolution), kind["dtype"], kind["device"], kind["channels_last"]
    return example, layer, weight, buckets, in_order


def _samples(calls: Sequence[Callable[[], object]], device: torch.device, budget: float) -> list[list[float]]:
    """Return the seconds of each call; calls alternate for about ``budget`` seconds in all, and at least three times.

    A single thread is timed by its CPU time, which does not depend on other work on the machine.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    single = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if single else time.perf_counter
    times: list[list[float]] = [[] for _ in calls]
    with torch.inference_mode():
        for call in calls:
            call()  # warm-up: allocates memory and lets libraries make their plans
        end = time.perf_counter() + budget
        while len(times[-1]) < 3 or (time.perf_counter() < end and len(times[-1]) < 100):
            for place in _ORDER.sample(range(len(calls)), len(calls)):
                wait()
                start = clock()
                calls[place]()
                wait()
                times[place].append(clock() - start)
    return times


def _shape(kind: Mapping[str, Any], convolution: Convolution) -> tuple[int, ...]:
    """Return the shape of the convolution's input with the channels that are left, with or without a batch."""
    *batch, _ = kind["shape"][: -convolution.axes]
    return (*batch, convolution.channels, *kind["shape"][-convolution.axes :])


def _random(shape: Sequence[int], kind: Mapping[str, Any]) -> Tensor:
    """Return random numbers in place of a layer's input, with the channels that are left."""
    generator = torch.Generator(kind["device"]).manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=kind["dtype"], device=kind["device"])
    return x.to(memory_format=FORMATS[x.dim()]) if kind["channels_last"] else x
