"""Peak memory of a call, from the allocations that torch's profiler records."""

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most bytes of CPU tensors that exist at once, beside those from before the call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
