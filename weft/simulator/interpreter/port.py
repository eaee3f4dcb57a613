"""Interface from the interpreter to the machine: the running program, and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from weft.simulator.places import Order, Places
from weft.simulator.ptx.threads import Position
from weft.triton_api import JITFunction

# Argument in ``kernel[grid]``: sizes, or a function that makes them from the bound arguments.
GridSizes = Sequence[int] | Callable[[Mapping[str, object]], Sequence[int]]


class Port(Protocol):
    """Interface of the virtual machine to the interpreter.

    Places, and address, bit and mask arrays of a call have one shape, (1,) for a scalar. Arrays may be read-only and not
    contiguous.
    Addresses are results of ``pointer`` plus the kernel's pointer arithmetic.
    """

    def pointer(self, tensor: torch.Tensor) -> int:
        """64-bit address that a kernel gets for a tensor argument."""

    def program(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """(program index, grid) of the running program."""

    def load(self, places: Places, access: str) -> np.ndarray:
        """Raw bits (uint8/16/32/64 by the element size) as a new array. Zeros where masked off.

        ``access`` is "plain", "volatile" or "tma".
        """

    def store(self, places: Places, bits: np.ndarray, access: str) -> None:
        """Store raw bits. ``access`` is "plain", "tma" or "relaxed" (at system scope)."""

    def atomic(self, op: str, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, order: Order) -> np.ndarray:
        """Old raw bits of an atomic computed in the dtype of ``values``.

        op  add, fadd, xchg, min, max, umin, umax, and, or, xor
        """

    def cas(self, addresses: np.ndarray, compare: np.ndarray, bits: np.ndarray, order: Order) -> np.ndarray: ...

    def barrier(self) -> None: ...

    def fence(self, scope: str = "sys") -> None: ...

    def fence_async(self) -> None:
        """Proxy fence, after which the program's tensor-descriptor loads see what it sees."""

    def drain_async(self, by_all: bool) -> None:
        """Complete the program's tensor-descriptor stores. ``by_all``: all threads wait for them."""

    def multicast(self, addresses: np.ndarray) -> list[np.ndarray]:
        """Addresses, at each member, of multicast addresses. NotInterpretable where they are not."""

    # Threads of the running program

    def position(self) -> Position:
        """Special registers of the running program's threads."""

    def active_threads(self) -> np.ndarray | None:
        """Threads that execute the present branch, as a mask; None for all."""

    def diverge(self, taken: np.ndarray) -> bool:
        """Enter a branch that the threads ``taken`` take. False, without entering it, if there is none."""

    def converge(self) -> None:
        """Leave the innermost such branch."""

    def computed(self, operations: int) -> None:
        """Note a matrix product of the running program."""

    def has_exact_dots(self) -> bool:
        """True if matrix products of the running program do not depend on the shapes of their blocks."""

    def wait_for_previous_kernel(self) -> None: ...

    def let_next_kernel_start(self) -> None:
        """Allow the next kernel's programs to start while the running ones execute."""

    def external(self, symbol: str) -> Callable[..., int] | None:
        """External function on scalars by its symbol, other than libdevice's; None: there is none."""

    def launch(self, jit_fn: JITFunction, grid: GridSizes, args: tuple, kwargs: dict) -> None:
        """Run ``kernel[grid](*args, **kwargs)``, launched while the interpreter is active."""
