"""Race detector: accesses to memory that happens-before does not order, and reads of unwritten memory.

FastTrack (Flanagan and Freund, PLDI 2009) on whole tiles, with read sets instead of read clocks (``shadow``). Each access is
checked against the last write of every element it touches and the reads since. Atomics and volatile loads are *strong*: two
strong accesses whose scopes include each other do not race.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from weft.check.detector.advice import advice_for
from weft.check.detector.findings import Finding, Place, Side, allowed_by
from weft.check.detector.shadow import INITIAL, UNWRITTEN, Cells, ReadSets, Shadow, distinct, extents_of, mapped, where
from weft.check.detector.thread_clocks import (
    ASYNC,
    AWAITED,
    BLOCK,
    COPYING,
    DELIVERY,
    FLAGGED,
    SCALAR,
    Access,
    ProgramClock,
    Sync,
    ThreadClock,
)
from weft.check.detector.vector_clocks import LAMPORT, ORDER, UNFENCED_LAMPORT, Slots, at, receive
from weft.simulator.interpreter import CodeLine
from weft.simulator.machine.machine import Machine
from weft.simulator.machine.memory import Extent

_COPIES = (DELIVERY, COPYING)


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements ``first`` to ``last`` of a tensor of ``rank``; no tensor is concerned if its name is ""."""

    tensor: str = ""
    rank: int = 0
    first: int = 0
    last: int = 0


def elements_at(extent: Extent, low: int, high: int) -> Elements:
    """Elements of a tensor at the addresses ``low`` to ``high``."""
    first, last = ((address - extent.base) // extent.itemsize for address in (low, high))
    return Elements(extent.name, extent.rank, first, last)


# Sentences by kind: for two accesses of one program, after "the release in ..., acquired before LINE, ", and for any two.
_OF_ONE_PROGRAM = {
    "unquieted": "{second} accesses memory that the copy of {first} may still read or write: only quiet() completes it",
    "undrained-tma": "{second} accesses what the same program stored through a descriptor in {first} and has not drained",
}
_NOT_COVERED = {
    "missing-barrier": "covers only what came before the last CTA barrier, and {first} comes after it",
    "undrained-tma": "does not cover the tensor-descriptor store in {first}, which was not drained before a CTA barrier",
    "unquieted": "does not cover the copy of {first}, which was not completed before it",
}
_OF_TWO_LINES = {
    "proxy-fence": "{second} loads through a descriptor what {first} stored: acquired, but without a proxy fence in between",
    "early-access": "{second} comes before the program waits for the previous kernel (launch_pdl=True), and only that wait "
    "orders {first} before it",
    "overtaken": "{first} may land after {second}: rank {rank} knows of it only from words that rank {other_rank} sent later "
    "without a fence, and a later store may overtake an earlier one",
}


class Races:
    """Shadow memory of every extent, all accesses by number, and the findings so far."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.memory, self.interpreter = machine, machine.memory, machine.interpreter
        self.slots = Slots()
        self.findings: dict[tuple, Finding] = {}
        self.counts: dict[tuple, int] = {}
        self._shadows: dict[int, Shadow] = {}
        self._accesses: list[Access | None] = [None, None]  # UNWRITTEN, INITIAL
        self._sets = ReadSets()
        self._reported: set[tuple] = set()
        self._places: dict[tuple, Place] = {}

    # --- accesses ----------------------------------------------------------------------------------------------------

    def access(self, thread: ThreadClock, kind: str, verb: str, scope: str | None = None) -> Access:
        """Access that ``thread`` makes now: one object per source line until the thread publishes again."""
        code = self.code() if isinstance(thread, ProgramClock) else thread.code
        key = (kind, verb, code, scope)
        known = thread.accesses.get(key)
        if known is None:
            slot, time, seq = thread.stamp(kind)
            known = Access(len(self._accesses), thread, kind, slot, time, seq, verb, code, scope, thread.sync)
            self._accesses.append(known)
            thread.accesses[key] = known
        return known

    def _landed(self, store: Access) -> Access:
        """The program's own Lamport ``store``, as an access known to be in memory."""
        thread, key = store.thread, ("landed", store.number)
        if key not in thread.accesses:
            slot, time, seq = thread.stamp(AWAITED)
            in_memory = replace(store, number=len(self._accesses), kind=AWAITED, slot=slot, time=time, seq=seq)
            self._accesses.append(in_memory)
            thread.accesses[key] = in_memory
        return thread.accesses[key]

    def code(self) -> CodeLine | None:
        """Line of the innermost kernel code outside the language's own primitives."""
        return self.interpreter.kernel_line()

    def read(
        self,
        access: Access,
        addresses: np.ndarray,
        itemsize: int,
        bits: np.ndarray | None,
        *,
        tma: bool = False,
        lamport: bool = False,
    ) -> set[int]:
        """Check and record a read. Returns the numbers of the writes that were read.

        addresses  one-dimensional, in known extents
        bits       the bits read, None if unknown
        """
        seen: set[int] = set()
        proxy = access.thread.proxy if tma else None
        for extent, offsets in extents_of(self.memory.find, addresses):
            shadow = self._shadow(extent)
            cells = shadow.cells(offsets, itemsize)
            writes = shadow.writes[cells]
            landed: dict[int, int] = {}  # own Lamport stores, seen in memory
            numbers = distinct(writes)
            seen.update(numbers)
            for number in numbers:
                if number == UNWRITTEN:
                    self._check_written(shadow, cells, writes, access, bits if offsets.size == addresses.size else None)
                elif number != INITIAL and not self._received(access, number, landed, lamport):
                    writer = self._accesses[number]
                    kind = self._conflict(writer, access, lamport, proxy)
                    if kind is not None:
                        self._race(kind, writer, access, shadow, where(cells, writes == number))
            self._record_read(access, shadow, cells, landed, lamport)
        return seen

    def _received(self, access: Access, number: int, landed: dict[int, int], lamport: bool) -> bool:
        """True if a read received the write of this number: a message, or words that are a signal themselves.

        The reader then counts as the words' writer: in ``landed``.
        """
        thread, writer = access.thread, self._accesses[number]
        if lamport and writer.message is not None:
            thread.clock = receive(thread.clock, writer.message)
        elif access.kind is AWAITED and writer.kind is FLAGGED and writer.thread is thread:
            landed[number] = self._landed(writer).number
        elif access.kind is AWAITED and writer.words is not None and not self._knows(access, writer, False):
            thread.saw(writer.words)
            landed[number] = access.number
        else:
            return False
        return True

    def _record_read(self, access: Access, shadow: Shadow, cells: Cells, landed: dict[int, int], lamport: bool) -> None:
        if lamport:
            # From here on the reader counts as the words' writer, since only the words order the real one.
            writes = shadow.writes[cells]
            shadow.writes[cells] = mapped(writes, lambda n: access.number if self._is_message(n) else n)
        elif landed:
            shadow.writes[cells] = mapped(shadow.writes[cells], lambda n: landed.get(n, n))
        shadow.reads[cells] = mapped(shadow.reads[cells], lambda n: self._with_reader(n, access))

    def crossed(self, number: int, access: Access, low: int, high: int) -> None:
        """Report a load of bytes ``low .. high - 1`` by threads that did not make the store ``number``."""
        store, extent = self._accesses[number], self.memory.find(low)
        key = ("cta-race", number, access.number)
        if extent is not None and key not in self._reported:
            self._reported.add(key)
            text = (
                f"{self.line_of(access)} loads in other threads of the program than {self.line_of(store)} stored, without a "
                f"CTA barrier in between"
            )
            self.report("cta-race", text, (store, access), elements_at(extent, low, high - 1))

    def write(self, access: Access, addresses: np.ndarray, itemsize: int, *, lamport: bool = False) -> None:
        for extent, offsets in extents_of(self.memory.find, addresses):
            shadow = self._shadow(extent)
            cells = shadow.cells(offsets, itemsize)
            writes, readers = shadow.writes[cells], shadow.reads[cells]
            for number in distinct(writes):
                if number > INITIAL:
                    self._judge(self._accesses[number], access, shadow, cells, writes == number, lamport)
            kept: dict[int, int] = {}
            for number in distinct(readers):
                left = []
                for member in self._sets[number]:
                    reader = self._accesses[member]
                    if not self._knows(access, reader, lamport) and not _was_performed(access.thread, reader):
                        left.append(member)
                        self._judge(reader, access, shadow, cells, readers == number, lamport)
                kept[number] = self._sets.number(tuple(left) if access.scope else ())
            shadow.writes[cells] = access.number
            shadow.reads[cells] = mapped(readers, kept.__getitem__)

    def forget(self, base: int) -> None:
        """Drop the shadow of a removed extent, whose addresses may be reused."""
        self._shadows.pop(base, None)

    def is_past(self, base: int, clock: np.ndarray) -> bool:
        """True if ``clock`` covers all recorded accesses to the extent at ``base``."""
        shadow = self._shadows.get(base)
        if shadow is None or shadow.unit == 0:
            return True
        numbers = {number for number in distinct(shadow.writes) if number > INITIAL}
        for number in distinct(shadow.reads):
            numbers.update(self._sets[number])
        return all(at(clock, (one := self._accesses[number]).slot) >= one.time for number in numbers)

    def last_store(self, address: int) -> Access | None:
        """Last write of the byte; None if its extent is unknown."""
        extent = self.memory.find(address)
        shadow = self._shadows.get(extent.base) if extent is not None else None
        return None if shadow is None else self._accesses[shadow.writes[(address - extent.base) // shadow.unit]]

    # --- order -------------------------------------------------------------------------------------------------------

    def _knows(self, access: Access, earlier: Access, lamport: bool) -> bool:
        return at(access.thread.clock, earlier.slot, LAMPORT if lamport else ORDER) >= earlier.time

    def _conflict(self, earlier: Access, access: Access, lamport: bool, proxy: np.ndarray | None) -> str | None:
        """Kind of the race; None if the two are ordered or may be concurrent."""
        thread = access.thread
        if self._knows(access, earlier, lamport):
            return "proxy-fence" if proxy is not None and at(proxy, earlier.slot) < earlier.time else None
        if earlier.thread is thread:
            if earlier.kind in _COPIES:
                return "unquieted"
            return "undrained-tma" if access.kind is not ASYNC else None
        if _is_before_previous_kernel(thread, earlier):
            return "early-access"
        if earlier.kind is AWAITED and access.words is not None:
            return None  # words that are polled until they change
        if earlier.scope and access.scope:
            return None if _include_each_other(earlier, access) else "scope"
        return self._unordered(thread, earlier, lamport)

    def _unordered(self, thread: ThreadClock, earlier: Access, lamport: bool) -> str:
        """Kind of the race of an access that nothing orders after ``earlier``, of another thread."""
        if self._is_beyond_release(thread, earlier):
            return {ASYNC: "undrained-tma", **dict.fromkeys(_COPIES, "unquieted")}.get(earlier.kind, "missing-barrier")
        if lamport and at(thread.clock, earlier.slot, UNFENCED_LAMPORT) >= earlier.time:
            return "overtaken"
        note = thread.note_for(earlier)
        return "race" if note is None else note.kind

    def _is_beyond_release(self, thread: ThreadClock, earlier: Access) -> bool:
        """True if ``thread`` knows a later release of the access's program, which does not cover the access."""
        if not earlier.seq or earlier.kind is SCALAR:
            return False
        slot = self.slots.of(earlier.thread.rank, ("program", earlier.thread._index, SCALAR))
        return at(thread.clock, slot) >= earlier.seq

    def _judge(
        self, earlier: Access, access: Access, shadow: Shadow, cells: Cells, mask: np.ndarray, lamport: bool
    ) -> None:
        if earlier.kind is DELIVERY and earlier.thread is access.thread and earlier.thread.delivered(earlier):
            return
        kind = self._conflict(earlier, access, lamport, None)
        if kind is not None:
            self._race(kind, earlier, access, shadow, where(cells, mask))

    def _with_reader(self, number: int, access: Access) -> int:
        members = self._sets[number]
        if access.number in members:
            return number
        kept = [m for m in members if not self._superseded(self._accesses[m], access)]
        return self._sets.number((*kept, access.number))

    def _superseded(self, reader: Access, by: Access) -> bool:
        return (reader.scope is not None or by.scope is None) and self._knows(by, reader, False)

    def _is_message(self, number: int) -> bool:
        return number > INITIAL and self._accesses[number].message is not None

    def _shadow(self, extent: Extent) -> Shadow:
        shadow = self._shadows.get(extent.base)
        if shadow is None or shadow.extent.size < extent.size:
            fresh = extent.base in self.machine.uninitialised
            shadow = self._shadows[extent.base] = Shadow(extent, UNWRITTEN if fresh else INITIAL)
        return shadow

    # --- findings ----------------------------------------------------------------------------------------------------

    def _check_written(
        self, shadow: Shadow, cells: Cells, writes: np.ndarray, access: Access, bits: np.ndarray | None
    ) -> None:
        """Report a read of memory that still holds the poison's bits.

        Other bits may come from writes that the checker cannot see.
        """
        if bits is None:
            return
        poison = bits.ravel() == np.iinfo(bits.dtype).max
        fresh = (
            writes.reshape(poison.size, -1) == UNWRITTEN
            if writes.size != poison.size
            else (writes == UNWRITTEN)[:, None]
        )
        bad = (fresh & poison[:, None]).ravel()
        if bad.any() and (access.number, shadow.extent.base) not in self._reported:
            self._reported.add((access.number, shadow.extent.base))
            name, owner = shadow.extent.name, shadow.extent.rank
            text = f"{self.describe(access)} reads {name} of rank {owner}, which has not been written since it was allocated"
            self.report("uninitialised", text, (access,), _elements(shadow, where(cells, bad)))

    def _race(self, kind: str, earlier: Access, access: Access, shadow: Shadow, cells: np.ndarray) -> None:
        if kind == "race" and (earlier.resets or access.resets):
            kind = "signal-reset"
        key = (kind, earlier.number, access.number, shadow.extent.base)
        if key in self._reported:
            return
        self._reported.add(key)
        text, advice = self._sentence(kind, earlier, access), advice_for(kind, earlier, access, self.place)
        self.report(kind, text, (earlier, access), _elements(shadow, cells), advice=advice)

    def _sentence(self, kind: str, earlier: Access, access: Access) -> str:
        first, second = self.line_of(earlier), self.line_of(access)
        if earlier.thread is access.thread and kind in _OF_ONE_PROGRAM:
            return _OF_ONE_PROGRAM[kind].format(first=first, second=second)
        note = access.thread.note_for(earlier)
        if note is not None and note.kind == kind == "missing-barrier":
            return note.sentence
        if kind in _NOT_COVERED:
            release = next((r for r in earlier.thread.releases if r.count >= earlier.seq), None)
            where_ = f"the release in {self.place(release.code)}" if release else "the release"
            return f"{where_}, acquired before {second}, {_NOT_COVERED[kind].format(first=first)}"
        if kind in _OF_TWO_LINES:
            ranks = {"rank": access.thread.rank, "other_rank": earlier.thread.rank}
            return _OF_TWO_LINES[kind].format(first=first, second=second, **ranks)
        if kind == "scope" and earlier.scope and access.scope:
            one, other = f"{first} (scope {earlier.scope})", f"{second} (scope {access.scope})"
            return f"{one} and {other} are atomics whose scopes do not include each other"
        if note is not None and note.kind == kind:
            return note.sentence
        return self._sentence_of_race(kind, earlier, access)

    def _sentence_of_race(self, kind: str, earlier: Access, access: Access) -> str:
        first, second = self.line_of(earlier), self.line_of(access)
        if kind == "signal-reset":
            reset, other = (second, first) if access.resets else (first, second)
            return f"{reset} resets a signal that {other} uses: nothing orders the two"
        if earlier.thread is access.thread:
            return f"{first} and {second} are not ordered"
        if access.kind is FLAGGED:
            return (
                f"no words that rank {earlier.thread.rank} sent after {first} are received before {second} (rank "
                f"{access.thread.rank})"
            )
        return f"no release after {first} (rank {earlier.thread.rank}) is acquired before {second} (rank {access.thread.rank})"

    def report(
        self,
        kind: str,
        message: str,
        accesses: Iterable[Access],
        elements: Elements = Elements(),
        *,
        detail: tuple[str, ...] = (),
        advice: str = "",
    ) -> None:
        sides = tuple(self.side(a) for a in accesses)
        finding = Finding(
            kind=kind, message=message, tensor=elements.tensor, rank=elements.rank, first=elements.first, last=elements.last,
            sides=sides, detail=detail, allowed=allowed_by(kind, sides), advice=advice,
        )  # fmt: skip
        self.findings.setdefault(finding.cause, finding)
        self.counts[finding.cause] = self.counts.get(finding.cause, 0) + 1

    def side(self, access: Access) -> Side:
        thread = access.thread
        return Side(
            rank=thread.rank,
            task=thread.label,
            verb=access.verb,
            place=self.place(access.code),
            sync=self.describe_sync(access.sync),
            through=self._signals(access.sync),
            ended=self._ended(access.sync),
        )

    def place(self, code: tuple | None) -> Place | None:
        if code is None:
            return None
        if code not in self._places:
            import linecache

            source, line = code
            text = linecache.getline(source.co_filename, line).strip()
            self._places[code] = Place(file=source.co_filename, line=line, function=source.co_name, text=text)
        return self._places[code]

    def describe_sync(self, sync: Sync) -> str:
        target = f" {self.memory.describe(sync.address)}" if sync.address is not None else ""
        return f"{sync.verb}{target}{f' in {self.place(sync.code)}' if sync.code else ''}"

    def _signals(self, sync: Sync) -> str:
        extent = self.memory.remembered(sync.address) if sync.address is not None else None
        return extent.name if extent is not None else ""

    def _ended(self, sync: Sync) -> str:
        write = sync.write
        if write is None:
            return ""
        place = self.place(write.access.code)
        who = f"{write.access.verb} of {write.access.thread.label}"
        return f"{who}{f' in {place}' if place else ''}, from {write.old} to {write.value}"

    def line_of(self, access: Access) -> str:
        place = self.place(access.code)
        return f"line {place.line}" if place else f"{access.verb} of {access.thread.label}"

    def describe(self, access: Access) -> str:
        place = self.place(access.code)
        return f"{access.thread.label} ({place})" if place else f"{access.thread.label} ({access.verb})"


def _was_performed(thread: ThreadClock, reader: Access) -> bool:
    """True if ``thread`` has seen, acquired or not, a write that came after the load had its value."""
    seen = thread.seen if isinstance(thread, ProgramClock) else None
    return seen is not None and at(seen, reader.slot) >= reader.time


def _is_before_previous_kernel(thread: ThreadClock, earlier: Access) -> bool:
    """True if only the end of the kernel before, for which ``thread`` has not waited, orders ``earlier``."""
    ahead = thread.ahead if isinstance(thread, ProgramClock) else None
    return ahead is not None and at(ahead, earlier.slot) >= earlier.time


def _include_each_other(earlier: Access, access: Access) -> bool:
    """True if the scopes of two strong accesses include each other."""
    if earlier.scope == access.scope == "sys":
        return True
    return earlier.thread.rank == access.thread.rank and "cta" not in (earlier.scope, access.scope)


def _elements(shadow: Shadow, cells: np.ndarray) -> Elements:
    return Elements(shadow.extent.name, shadow.extent.rank, *shadow.elements(cells))


def kind_of(addresses: np.ndarray) -> str:
    """Kind of a store or an atomic: one address means one thread, several mean all threads."""
    return SCALAR if addresses.size == 1 else BLOCK
