"""The words that spin or order, as the simulator runs them.

Who spins blocks, so that a deadlock is seen at once and reported by name; the leaves that order memory say so to the
machine, whose checker knows what each promises. All other words are interpreted as they are written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl

from weft.language import lamport, signals
from weft.language.lowering import stock
from weft.simulator.words import simulated


@simulated(signals.wait)
def _wait(machine: Any, signal: Any, value: Any, team: Any) -> Any:
    from weft.simulator import interpreter as interp  # needs NumPy types that only the simulator installs

    address = int(interp.addresses_of(signal).ravel()[0])
    bits = interp.element_dtype(signal).primitive_bitwidth
    wanted = int(np.asarray(interp.value_of(value)).ravel()[0])
    half = 1 << (bits - 1)

    def reached(word: int) -> bool:
        return (word - wanted + half) % (2 * half) >= half

    word = machine.wait_for_word(address, bits // 8, reached, wanted)
    machine.fence_async()
    return interp.scalar(word - 2 * half if word >= half else word, tl.int64 if bits == 64 else tl.int32)


@simulated(lamport.lamport_load)
def _lamport_load(machine: Any, ptr: Any, mask: Any, team: Any) -> Any:
    from weft.simulator import interpreter as interp

    addresses = interp.addresses_of(ptr)
    active = np.broadcast_to(np.asarray(interp.value_of(mask), dtype=bool), addresses.shape)
    dtype = interp.element_dtype(ptr)
    itemsize = dtype.primitive_bitwidth // 8
    addresses = machine.plain(addresses, active, itemsize, "load")
    unwritten = 1 << (8 * itemsize - 1)  # the bits of -0.0

    def missing() -> int:
        return int((machine.memory.load(addresses, active, itemsize, machine.who) == unwritten).sum())

    if active.any():
        low, high = int(addresses[active].min()), int(addresses[active].max()) + itemsize
        machine.touch(low, high)
    if missing():
        what = machine.memory.describe(low)
        machine.wait_for_bytes(
            low, high, lambda: missing() == 0, lambda: f"waits for {missing()} unwritten elements from {what}"
        )
    bits = machine.load(addresses, active, itemsize, "lamport")
    return interp.block(bits.view(interp.numpy_dtype(dtype)), dtype)


@simulated(lamport.lamport_load_keyed)
def _lamport_load_keyed(machine: Any, ptr: Any, mask: Any, key: Any, key_mask: Any, team: Any) -> tuple[Any, Any]:
    return _lamport_load(machine, ptr, mask, team), _lamport_load(machine, key, key_mask, team)


@simulated(stock.store_flagged)
def _store_flagged(machine: Any, ptr: Any, x: Any, mask: Any) -> None:
    from weft.simulator import interpreter as interp

    addresses = interp.addresses_of(ptr)
    values = np.broadcast_to(interp.value_of(x.to(interp.element_dtype(ptr))), addresses.shape)
    active = np.broadcast_to(np.asarray(interp.value_of(mask), dtype=bool), addresses.shape)
    machine.store(addresses, np.ascontiguousarray(values).view(f"uint{8 * values.itemsize}"), active, "lamport")


@simulated(stock.store_release)
def _store_release(machine: Any, ptr: Any, value: Any) -> None:
    from weft.simulator import interpreter as interp

    bits = interp.element_dtype(ptr).primitive_bitwidth
    word = int(np.asarray(interp.value_of(value)).ravel()[0])
    machine.release_store(int(interp.addresses_of(ptr).ravel()[0]), word, bits // 8)


@simulated(stock.drain_tma_stores)
def _drain_tma_stores(machine: Any) -> None:
    machine.drain_async()


@simulated(stock.complete_stores)
def _complete_stores(machine: Any) -> None:
    """A program's stores are one after the other here, whatever thread they are of."""


@simulated(stock.fence_before_tma_loads)
def _fence_before_tma_loads(machine: Any) -> None:
    machine.fence_async()


@simulated(stock.wait_for_previous_kernel)
def _wait_for_previous_kernel(machine: Any) -> None:
    machine.wait_for_previous_kernel()


@simulated(stock.let_next_kernel_start)
def _let_next_kernel_start(machine: Any) -> None:
    machine.let_next_kernel_start()


@simulated(stock.fence_system)
def _fence_system(machine: Any, word: Any) -> None:
    machine.fence()
