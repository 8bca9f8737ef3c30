"""Code shared by all benchmarks: interleaved timing, bandwidth, peak memory, JSON. GPUs are timed by gpu_timer.py."""

import contextlib
import gc
import json
import multiprocessing
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from loco_ext.output import replacing

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"

# A clock takes a candidate's name, its call, and a function of the name to run untimed before the call; it returns the
# seconds of the call.
Clock = Callable[[str, Callable[[], object], Callable[[str], object] | None], float]

# Number of arrays that a kernel reads or writes, by STREAM's convention. Copy and triad also fetch the lines that they
# overwrite, which is not counted; update, which works in place as an optimizer does, has no such hidden traffic.
STREAM_ARRAYS = {"copy": 2, "triad": 3, "update": 3}


@dataclass(frozen=True)
class Timing:
    """Seconds per call over all rounds.

    ``median`` is the mean of the medians of groups of calls; a group shares memory placement and predecessor. Times
    cluster around one value for each combination of cache state and memory placement; the median of all calls would
    jump between two of these values.
    """

    median: float
    p20: float
    p80: float
    best: float
    rounds: int


@dataclass(frozen=True)
class Effort:
    """Duration of a measurement: ``builds`` times, candidates are built and measured until both minima are reached."""

    min_rounds: int = 24
    min_seconds: float = 5.0
    warmup: int = 3
    builds: int = 3


@dataclass
class _Build:
    """The calls of one build: seconds and predecessor of each candidate's calls, in the order of rounds."""

    seconds: dict[str, list[float]]
    previous: dict[str, list[str]]

    def groups(self, name: str) -> list[list[float]]:
        """Return a candidate's seconds, one list for each predecessor."""
        found: dict[str, list[float]] = defaultdict(list)
        for seconds, previous in zip(self.seconds[name], self.previous[name], strict=True):
            found[previous].append(seconds)
        return list(found.values())


class Comparison(dict[str, Timing]):
    """Timings of the candidates, by name."""

    def __init__(self, builds: Sequence[_Build]) -> None:
        names = builds[0].seconds
        super().__init__({name: summarise([g for b in builds for g in b.groups(name)]) for name in names})
        self.builds = builds

    def ratio(self, a: str, b: str) -> float:
        """Return the time of ``a`` over that of ``b``: the median over rounds of their quotient, averaged over builds.

        A change of the machine's speed that lasts longer than a round affects both and cancels in the quotient.
        """
        quotients = (np.divide(build.seconds[a], build.seconds[b]) for build in self.builds)
        return float(np.mean([np.median(values) for values in quotients]))

    def ratios(self, pairs: Mapping[str, tuple[str, str]]) -> dict[str, float]:
        """Return the ratios by name, of those pairs (numerator, denominator) that were both run."""
        return {name: self.ratio(a, b) for name, (a, b) in pairs.items() if a in self and b in self}

    def record(self) -> dict[str, Any]:
        """Return the timings with the number of threads and the load of the machine, as plain data."""
        candidates = {name: asdict(timing) for name, timing in self.items()}
        return {"threads": torch.get_num_threads(), "load_average": os.getloadavg()[0], "candidates": candidates}


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def compare(
    build: Callable[[], Mapping[str, Callable[[], object]]],
    effort: Effort,
    label: str = "",
    before: Callable[[str], object] | None = None,
    clock: Clock | None = None,
) -> Comparison:
    """Time the candidates in turn, round after round, so that all of them see the same state of the machine.

    Each round calls every candidate once, in a random order. The cache state that a candidate finds depends on its
    predecessors, and its speed on the addresses of its tensors, both by several percent; its figures therefore average
    over predecessors and over ``effort.builds`` calls of ``build``, which makes the candidates (see :class:`Timing`).
    ``before`` is called, untimed, with the candidate's name before every call. ``clock`` makes the call and returns its
    seconds; by default it is the host's clock.

    Raises:
        ValueError: there is no candidate.

    Example:
        >>> timings = compare(lambda: {"sum": lambda: sum(range(99))}, Effort(min_rounds=5, min_seconds=0.0, builds=2))
        >>> timings["sum"].rounds
        10
    """
    label = f"{label}, threads {torch.get_num_threads()}"
    order = random.Random(label)
    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
    with tqdm(total=effort.builds, desc=label, delay=2, leave=False, bar_format=form) as bar:
        clock = clock or host_seconds
        return Comparison([_compare_build(build, effort, order, before, clock, bar) for _ in range(effort.builds)])


def _compare_build(
    build: Callable[[], Mapping[str, Callable[[], object]]],
    effort: Effort,
    order: random.Random,
    before: Callable[[str], object] | None,
    clock: Clock,
    bar: Any,
) -> _Build:
    done = round(bar.n)
    with _no_garbage_collection():
        candidates = build()
        if not candidates:
            raise ValueError("build: expected at least one candidate, got none")
        names = list(candidates)
        calls = _Build({name: [] for name in names}, {name: [] for name in names})
        for name in names * effort.warmup:
            clock(name, candidates[name], before)
        rounds, start, previous = 0, time.perf_counter(), names[-1]
        while rounds < effort.min_rounds or time.perf_counter() - start < effort.min_seconds:
            for name in order.sample(names, len(names)):
                calls.seconds[name].append(clock(name, candidates[name], before))
                calls.previous[name].append(previous)
                previous = name
            rounds += 1
            elapsed = time.perf_counter() - start
            share = min(rounds / max(effort.min_rounds, 1), elapsed / max(effort.min_seconds, 1e-9), 1.0)
            bar.update(done + share - bar.n)
    return calls


def check(name: str, found: torch.Tensor, reference: torch.Tensor, tolerance: float) -> None:
    """Raise RuntimeError if a result differs from the reference by more than this part of its largest number."""
    error = (found.double() - reference).abs().max().item()
    if not error <= (limit := tolerance * reference.abs().max().item()):
        raise RuntimeError(f"{name}: expected the reference's result within {limit:g}, got an error of {error:g}")


def clock_of(now: Callable[[], float]) -> Clock:
    """Return the clock that times a call by a function of the time module."""

    def seconds(name: str, call: Callable[[], object], before: Callable[[str], object] | None) -> float:
        if before is not None:
            before(name)
        start = now()
        call()
        return now() - start

    return seconds


host_seconds = clock_of(time.perf_counter)


def summarise(groups: Sequence[list[float]]) -> Timing:
    """Return the timing of calls that come in groups (see :class:`Timing`)."""
    together = [value for values in groups for value in values]
    p20, p80 = np.percentile(together, (20, 80)).tolist()
    median = float(np.mean([np.median(values) for values in groups]))
    return Timing(median=median, p20=p20, p80=p80, best=min(together), rounds=len(together))


def stream_kernels(elements: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Return copy ``a = b``, triad ``a = b + s*c`` and update ``a += s*b`` of ``elements`` float32 values in torch."""
    a, b, c = (torch.full((elements,), value) for value in (0.0, 1.0, 2.0))
    return {
        "copy": lambda: a.copy_(b),
        "triad": lambda: torch.add(b, c, alpha=3.0, out=a),
        "update": lambda: a.add_(b, alpha=3.0),
    }


def bandwidth(effort: Effort, elements: int = 1 << 26) -> dict[str, Any]:
    """Return bytes per second of the stream kernels with torch's present threads, for the median call and the best."""
    timings = compare(lambda: stream_kernels(elements), effort, "bandwidth")
    rates: dict[str, Any] = {"threads": torch.get_num_threads()}
    for name, timing in timings.items():
        moved = STREAM_ARRAYS[name] * 4 * elements
        rates[name] = {"median": moved / timing.median, "best": moved / timing.best}
    return rates


def peak_extra_memory(call: Callable[[], object]) -> int | None:
    """Return by how many bytes the process grows at most while ``call`` runs; None where /proc does not tell.

    The kernel's high-water mark is reset first, so that earlier peaks do not hide this one.
    """
    reset = Path("/proc/self/clear_refs")
    if not os.access(reset, os.W_OK):
        return None
    reset.write_text("5")
    resident = _status_bytes("VmRSS")
    call()
    return max(_status_bytes("VmHWM") - resident, 0)


def _status_bytes(field: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields[field].removesuffix("kB"))


def in_fresh_process(function: Callable[..., Any], *arguments: object) -> Any:
    """Call ``function(*arguments)`` in a new interpreter: importable function, picklable arguments and result."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def json_text(value: Any, indent: int = 0) -> str:
    """Return JSON with what fits in 280 columns on one line, floats rounded to nine significant digits.

    >>> json_text({"median": 1 / 3, "rounds": 8})
    '{"median": 0.333333333, "rounds": 8}'
    """
    if isinstance(value, float):
        value = float(f"{value:.9g}")
    if not isinstance(value, dict | list | tuple) or not value:
        return json.dumps(value)
    inner = indent + 1
    if isinstance(value, dict):
        parts, ends = [f"{json.dumps(str(key))}: {json_text(each, inner)}" for key, each in value.items()], "{}"
    else:
        parts, ends = [json_text(each, inner) for each in value], "[]"
    line = ends[0] + ", ".join(parts) + ends[1]
    if len(line) + indent <= 280 and "\n" not in line:
        return line
    space = "\n" + " " * inner
    return ends[0] + space + f",{space}".join(parts) + "\n" + " " * indent + ends[1]


def write_json(path: Path, report: object) -> None:
    """Write ``report`` to ``path`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json_text(report) + "\n")
