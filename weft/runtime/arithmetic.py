"""Whole numbers on the host. Triton's ``cdiv`` and ``next_power_of_2`` work in kernels too, which costs microseconds a call."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``, n >= 1."""
    return 1 << (n - 1).bit_length()
