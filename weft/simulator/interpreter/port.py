"""What the interpreter asks of the machine that it runs on: who runs, and memory."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Port(Protocol):
    """What the interpreter needs of the virtual machine.

    Address, bit and mask arrays of a call have one shape, (1,) for a scalar. They may be read-only and not contiguous.
    Addresses are what ``pointer`` gave, plus what kernels added to it.
    """

    def pointer(self, tensor: Any) -> int:
        """The address that a kernel gets for an argument, 64 bits."""

    def program(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """(program index, grid) of the program that is running now."""

    def load(self, addresses: np.ndarray, mask: np.ndarray, itemsize: int, access: str) -> np.ndarray:
        """Raw bits (uint8/16/32/64 by ``itemsize``) at ``addresses`` (uint64), zeros where masked off: a new array.

        ``access`` is "plain", "volatile" or "tma"."""

    def store(self, addresses: np.ndarray, bits: np.ndarray, mask: np.ndarray, access: str) -> None: ...

    def atomic(
        self, op: str, addresses: np.ndarray, bits: np.ndarray, mask: np.ndarray, dtype: np.dtype, sem: str, scope: str,
        access: str = "plain",
    ) -> np.ndarray:  # fmt: skip
        """Old raw bits; ``op`` of add, fadd, xchg, min, max, umin, umax, and, or, xor, computed in ``dtype``. ``access``: "tma"
        for a descriptor's reduction."""

    def cas(self, addresses: np.ndarray, compare: np.ndarray, bits: np.ndarray, sem: str, scope: str) -> np.ndarray: ...

    def barrier(self) -> None: ...

    def wait_for_previous_kernel(self) -> None: ...

    def let_next_kernel_start(self) -> None: ...

    def launch(self, jit_fn: Any, grid: Any, args: tuple, kwargs: dict) -> None:
        """A launch ``kernel[grid](*args, **kwargs)`` met while the interpreter is active."""
