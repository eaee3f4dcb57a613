"""Integer arithmetic on the host.

Triton's ``cdiv`` and ``next_power_of_2`` serve kernels too, and take microseconds a call.
"""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least ``n``, for n >= 1."""
    return 1 << (n - 1).bit_length()
