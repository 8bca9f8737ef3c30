"""Times on an NVIDIA GPU: its own, with cold caches, and those of the host to enqueue the same calls."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import loco_ext
from bench import harness

Call = Callable[[], object]

LEAD = 1.5  # the GPU is kept busy before a timed call for this multiple of the time that the host needs for the call
WARM_UP = 3  # calls before one is captured


class GpuTimer:
    """Times candidates by the clocks of the GPU and of the host.

    Attributes:
        copy_bandwidth: bytes per second, read and written, of a device copy, for the median call and the best.
    """

    def __init__(self, effort: harness.Effort) -> None:
        self.effort, self.flush = effort, cache_flush()
        timing = harness.compare(lambda: {"flush": self.flush}, effort, "cache flush", lambda _: self.flush(), seconds)
        self.flush_seconds = timing["flush"].median
        self.copy_bandwidth = copy_bandwidth(effort, self.flush)

    def compare(
        self, build: Callable[[], Mapping[str, Call]], label: str
    ) -> tuple[harness.Comparison, harness.Comparison]:
        """Return the GPU's time of every call, with a cold cache, and the host's time to enqueue it on an idle GPU.

        Before every call that the GPU's clock times, enough memory is read to evict the call's tensors from the cache,
        and for long enough that the host can enqueue the whole call meanwhile.
        """
        short = replace(self.effort, min_seconds=self.effort.min_seconds / 4, builds=1)
        host = harness.compare(build, short, f"{label}, host", lambda _: torch.cuda.synchronize())
        flushes = {name: 1 + math.ceil(LEAD * timing.median / self.flush_seconds) for name, timing in host.items()}

        def before(name: str) -> None:
            for _ in range(flushes[name]):
                self.flush()

        return harness.compare(build, self.effort, label, before, seconds), host


def seconds(name: str, call: Call, before: Callable[[str], object] | None) -> float:
    """Time a call by the GPU's clock, from the start of its first operation to the end of its last.

    While the GPU is still busy with the work of ``before``, the host runs ahead; otherwise the host's time counts where
    it is longer.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if before is not None:
        before(name)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def cache_flush() -> Call:
    """Return a call that reads four times the size of the GPU's cache, so that nothing else stays there.

    Reading leaves no dirty lines that would be written back during the timed call.
    """
    size = max(4 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size, 1 << 28)
    memory = torch.ones(size // 4, device="cuda")
    return memory.sum


def copy_bandwidth(effort: harness.Effort, flush: Call) -> dict[str, float]:
    """Return bytes per second, read and written, of a copy of random float32, for the median call and the best."""
    elements = 1 << 28

    def build() -> dict[str, Call]:
        source = torch.rand(elements, device="cuda")
        destination = torch.empty_like(source)
        return {"copy": lambda: destination.copy_(source)}

    timing = harness.compare(build, effort, "device copy", lambda _: flush(), seconds)["copy"]
    moved = harness.STREAM_ARRAYS["copy"] * 4 * elements
    return {"median": moved / timing.median, "best": moved / timing.best}


def both(gpu: Mapping[str, harness.Timing], host: Mapping[str, harness.Timing]) -> dict[str, dict[str, Any]]:
    """Return the GPU and host timings of each candidate as plain data."""
    return {name: {"gpu": asdict(gpu[name]), "host": asdict(host[name])} for name in gpu}


def step_seconds(gpu: Mapping[str, harness.Timing], host: Mapping[str, harness.Timing], mode: str) -> dict[str, float]:
    """Return the time of each step: eager, the longer of the times of GPU and host; from a graph, the GPU's."""
    return {name: max(gpu[name].median, host[name].median if mode == "eager" else 0.0) for name in gpu}


@dataclass(frozen=True)
class Replay:
    """A captured call. It keeps a reference to the call, whose tensors the graph reads and writes."""

    graph: torch.cuda.CUDAGraph
    call: Call

    def __call__(self) -> None:
        self.graph.replay()


def capture(call: Call) -> Call:
    """Return the call as a CUDA graph, after the warm-up calls that graphs need."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a capturable optimizer steps outside of a graph
        for _ in range(WARM_UP):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return Replay(graph, call)


def forced(call: Call, backend: str) -> Call:
    """Return the call, forced to one of our backends."""

    def call_in_backend() -> None:
        with loco_ext.backend(backend):
            call()

    return call_in_backend
