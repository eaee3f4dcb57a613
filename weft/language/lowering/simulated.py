"""Primitives that spin or order memory, as the simulator runs them.

A spinning primitive blocks its task, so that a deadlock is detected at once and reported by name. Leaves that order memory
report to the machine, whose checker knows what each promises. All other primitives are interpreted as they are written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import triton.language as tl

from weft.errors import NotAPeer, NotSymmetric, WeftError
from weft.language import bulk, lamport, signals, waits
from weft.language.arguments import check_flagged_block, check_value
from weft.language.lowering import stock, tracing
from weft.runtime.team.view import MAX_BARRIER_PROGRAMS
from weft.simulator.intrinsics import simulated
from weft.simulator.machine.memory import signed
from weft.simulator.machine.pointers import ADDRESS
from weft.simulator.places import UNSIGNED, Scattered, one_place

if TYPE_CHECKING:
    from weft.runtime.team.view import TeamView
    from weft.simulator.machine.machine import Machine


@simulated(signals.wait)
def _wait(machine: Machine, signal: tl.tensor, value: tl.tensor, team: TeamView) -> tl.tensor:
    check_value("wait", signal, value)
    return _wait_until(machine, signal, value, ">=", team)


@simulated(signals.wait_until)
def _wait_until(
    machine: Machine, signal: tl.tensor, value: tl.tensor, comparison: tl.constexpr, team: TeamView
) -> tl.tensor:
    interp = machine.values
    address, element = int(interp.addresses_of(signal)[0]), interp.element_dtype(signal)
    itemsize = element.primitive_bitwidth // 8
    # Modulo the signal's width, as in a GPU's registers.
    wanted = signed(interp.value_of(value), itemsize)
    _, word = machine.wait_for_words([address], itemsize, wanted, interp.value_of(comparison))
    machine.fence_async()
    return interp.scalar(signed(word, itemsize) if element.is_int_signed() else word, element)


@simulated(waits.await_all)
def _await_all(
    machine: Machine, signals: tl.tensor, left: tl.tensor, value: tl.tensor, comparison: tl.constexpr, team: TeamView
) -> None:
    """One wait after the other: a signal that has been seen once need not be looked at again."""
    interp = machine.values
    for index in np.flatnonzero(interp.value_of(left)):
        _wait_until(machine, signals + int(index), value, comparison, team)


@simulated(waits.await_any)
def _await_any(
    machine: Machine, signals: tl.tensor, left: tl.tensor, value: tl.tensor, comparison: tl.constexpr, team: TeamView
) -> tl.tensor:
    interp = machine.values
    address, itemsize = int(interp.addresses_of(signals)[0]), interp.element_dtype(signals).primitive_bitwidth // 8
    asked = np.flatnonzero(interp.value_of(left)).tolist()
    chosen = -1
    if asked:
        words, wanted = [address + index * itemsize for index in asked], signed(interp.value_of(value), itemsize)
        chosen = asked[machine.wait_for_words(words, itemsize, wanted, interp.value_of(comparison))[0]]
    machine.fence_async()
    return interp.scalar(chosen, tl.int32)


@simulated(lamport.lamport_load)
def _lamport_load(
    machine: Machine, ptr: tl.tensor, mask: tl.tensor, team: TeamView, words: tl.tensor | None = None
) -> tl.tensor:
    interp = machine.values
    check_flagged_block("lamport_load", "ptr", ptr, mask)
    addresses, dtype = interp.addresses_of(ptr), interp.element_dtype(ptr)
    active = np.broadcast_to(np.asarray(interp.value_of(mask), dtype=bool), addresses.shape)
    itemsize = dtype.primitive_bitwidth // 8
    places = machine.plain(Scattered(addresses, active, itemsize), "load")
    unwritten = UNSIGNED[itemsize].type(1 << (8 * itemsize - 1))  # the bits of -0.0

    def missing() -> int:
        return np.count_nonzero(machine.memory.read(places, machine.who) == unwritten)

    if interp.value_of(words) is not None:
        machine.observer.names_words(int(interp.addresses_of(words).ravel()[0]))
    if not places.is_empty:
        machine.stores.touch(places.low, places.high)
    if missing():
        what = machine.memory.describe(places.low)
        machine.wait_for_bytes(
            places.low, places.high, lambda: missing() == 0,
            lambda: f"waits for {missing()} unwritten elements from {what}",
        )  # fmt: skip
    bits = machine.load(places, "lamport")
    return interp.block(bits.view(interp.numpy_dtype(dtype)), dtype)


@simulated(lamport.lamport_load_keyed)
def _lamport_load_keyed(
    machine: Machine,
    ptr: tl.tensor,
    mask: tl.tensor,
    key: tl.tensor,
    key_mask: tl.tensor,
    team: TeamView,
    words: tl.tensor | None = None,
) -> tuple[tl.tensor, tl.tensor]:
    check_flagged_block("lamport_load_keyed", "ptr", ptr, mask)
    check_flagged_block("lamport_load_keyed", "key", key, key_mask)
    return _lamport_load(machine, ptr, mask, team, words), _lamport_load(machine, key, key_mask, team, words)


@simulated(stock.store_flagged)
def _store_flagged(machine: Machine, ptr: tl.tensor, x: tl.tensor, mask: tl.tensor) -> None:
    interp = machine.values
    addresses = interp.addresses_of(ptr)
    values = np.broadcast_to(interp.value_of(x.to(interp.element_dtype(ptr))), addresses.shape)
    active = np.broadcast_to(np.asarray(interp.value_of(mask), dtype=bool), addresses.shape)
    bits = np.ascontiguousarray(values).view(f"uint{8 * values.itemsize}")
    machine.store(Scattered(addresses, active, values.itemsize), bits, "lamport")


@simulated(stock.store_release)
def _store_release(machine: Machine, ptr: tl.tensor, value: tl.tensor) -> None:
    interp = machine.values
    bits = interp.element_dtype(ptr).primitive_bitwidth
    machine.release_store(int(interp.addresses_of(ptr)[0]), int(interp.value_of(value)), bits // 8)


@simulated(stock.drain_tma_stores)
def _drain_tma_stores(machine: Machine) -> None:
    machine.drain_async()


@simulated(stock.complete_stores)
def _complete_stores(machine: Machine) -> None:
    """Nothing to do: the simulator has one order of a program's stores, for all its threads."""


@simulated(bulk.copy_later)
def _copy_later(
    machine: Machine, target: tl.tensor, source: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr, WHAT: tl.constexpr
) -> None:
    from weft.simulator import numerics  # needs NumPy types that only the simulator installs

    interp = machine.values
    steps = np.arange(int(np.asarray(interp.value_of(n)).ravel()[0]), dtype=np.uint64)
    there, here = (interp.numpy_dtype(interp.element_dtype(ptr)) for ptr in (target, source))
    targets = interp.addresses_of(target).ravel()[0] + steps * np.uint64(there.itemsize)
    sources = interp.addresses_of(source).ravel()[0] + steps * np.uint64(here.itemsize)

    def convert(bits: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(numerics.convert(bits.view(here), there)).view(numerics.BITS[there.itemsize])

    machine.barrier()  # as in ``_copy``
    if steps.size:
        places = Scattered(targets, None, there.itemsize), Scattered(sources, None, here.itemsize)
        machine.copy_later(*places, convert, interp.value_of(WHAT))
    machine.barrier()


@simulated(stock.complete_copies)
def _complete_copies(machine: Machine) -> None:
    machine.complete_copies()


@simulated(stock.fence_before_tma_loads)
def _fence_before_tma_loads(machine: Machine) -> None:
    machine.fence_async()


@simulated(stock.wait_for_previous_kernel)
def _wait_for_previous_kernel(machine: Machine) -> None:
    machine.wait_for_previous_kernel()


@simulated(stock.let_next_kernel_start)
def _let_next_kernel_start(machine: Machine) -> None:
    machine.let_next_kernel_start()


@simulated(stock.exact_dots)
def _exact_dots(machine: Machine) -> None:
    machine.ask_exact_dots()


@simulated(stock.fence_system)
def _fence_system(machine: Machine, word: tl.tensor) -> None:
    machine.fence()


@simulated(tracing.begin)
def _begin(machine: Machine, team: TeamView) -> tl.tensor:
    interp = machine.values
    return interp.scalar(machine.observer.began(), tl.int32)


@simulated(tracing.record)
def _record(
    machine: Machine,
    kind: tl.constexpr,
    began: tl.tensor,
    address: tl.tensor,
    peer: tl.tensor,
    value: tl.tensor,
    happened: tl.tensor,
    team: TeamView,
) -> None:
    interp = machine.values
    numbers = (int(np.asarray(interp.value_of(x)).ravel()[0]) for x in (began, address, peer, value))
    machine.observer.recorded(interp.value_of(kind), *numbers)


@simulated(stock.meets_by_first_index)
def _meets_by_first_index(machine: Machine) -> None:
    _, (x, y, z) = machine.program()
    if y * z > 1:
        raise WeftError(
            f"{machine.who()}: barrier in a grid of {(x, y, z)}, whose programs are matched by tl.program_id(0) alone; "
            f"launch a one-dimensional grid"
        )
    if x > MAX_BARRIER_PROGRAMS:
        raise WeftError(
            f"{machine.who()}: barrier in a grid of {x:,} programs, more than the team's counters; launch at most "
            f"{MAX_BARRIER_PROGRAMS:,}"
        )


@simulated(stock.begins_epoch)
def _begins_epoch(machine: Machine, epoch: tl.tensor) -> None:
    machine.observer.epoch_began(*_word(machine, epoch))


@simulated(stock.ends_epoch)
def _ends_epoch(machine: Machine, epoch: tl.tensor) -> None:
    machine.observer.epoch_ended(*_word(machine, epoch))


def _word(machine: Machine, pointer: tl.tensor) -> tuple[int, int]:
    """(address, bytes) of the scalar at a pointer."""
    interp = machine.values
    itemsize = interp.element_dtype(pointer).primitive_bitwidth // 8
    return machine.plain(one_place(int(interp.addresses_of(pointer)[0]), (1,), itemsize), "load").low, itemsize


@simulated(stock.names_chunk)
def _names_chunk(machine: Machine, rank: tl.tensor, chunk: tl.tensor, chunks: tl.tensor, team: TeamView) -> None:
    interp = machine.values
    rank, chunk, chunks, size = (int(interp.value_of(x)) for x in (rank, chunk, chunks, team.size))
    if not (0 <= rank < size and 0 <= chunk < chunks):
        raise WeftError(
            f"{machine.who()}: rank={rank}, chunk={chunk} of a channel of {size} ranks and {chunks} chunks; pass a rank in "
            f"0 .. {size - 1} and a chunk in 0 .. {chunks - 1}"
        )


@simulated(stock.reaches_peers)
def _reaches_peers(machine: Machine, ptr: tl.tensor, peer: tl.tensor, team: TeamView) -> None:
    interp = machine.values
    me, size = (interp.value_of(team.coords) >> 1) - 1, int(interp.value_of(team.size))
    peers = np.asarray(interp.value_of(peer))
    strangers = peers[(peers < 0) | (peers >= size)]
    if strangers.size:
        raise NotAPeer(machine.who(), int(strangers.flat[0]), size)
    if np.all(interp.value_of(peer) == me):
        return
    pointer, memory, rank = int(interp.addresses_of(ptr).flat[0]), machine.memory, machine.rank
    if pointer == 0:  # torch's, of a tensor without elements
        return
    base, name = machine.pointers.origin(pointer)
    heap = memory.heap_of(pointer & ADDRESS) or memory.heap_of(base)
    if heap == memory.heap_of(int(interp.addresses_of(team.barriers)[0]) & ADDRESS):
        return
    if heap is None:
        raise NotSymmetric(rank, f"{machine.who()}: {name}")
    if memory.heap_rank(heap) == rank:
        raise WeftError(f"{machine.who()}: {name} is of another team's heap; pass the view of the team that made it")
    raise WeftError(
        f"{machine.who()}: the pointer into {name} leads to rank {memory.heap_rank(heap)}'s memory already; pass one of this "
        f"rank's, translated once"
    )
