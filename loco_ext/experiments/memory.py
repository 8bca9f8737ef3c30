"""Memory that the C library keeps for the next step, instead of giving it back to the system each time."""

import ctypes
import sys

# malloc.h of the GNU C library
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Lets this process keep what it frees, from now on; False where the C library cannot be asked for that.

    Activations are freed in every step. By default the C library returns much of them to the system, which clears each
    page anew when it is touched again: thousands of page faults a step, some percent of a small network's time. The
    price is that memory below what is still in use is never given back.

    Example:
        >>> keep_freed_memory() in (True, False)
        True
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _NEVER))
