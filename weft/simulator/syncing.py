"""Synchronisation words: what a release makes known, what an acquire learns, and what goes wrong with signals.

A word is any scalar that a notify, a wait or an atomic has touched. PTX in short: an acquire that reads a release's value, or
one that a chain of read-modify-writes made of it, learns what the releaser knew, if the scope of each includes the other.
What a release makes known is credited to the word when its store arrives: an acquire before that learns nothing of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from typing import Any

import numpy as np

from weft.simulator.races import Races
from weft.simulator.spinning import is_polled, waits_for_one_value
from weft.simulator.thread_clocks import SCALAR, Access, ProgramClock, Release, Sync, ThreadClock, Word


class Words:
    def __init__(self, races: Races) -> None:
        self._races, self._memory = races, races.memory
        self._words: dict[int, Word] = {}
        self._sorted: list[int] = []

    # --- finding them ------------------------------------------------------------------------------------------------

    def at(self, address: int, itemsize: int) -> Word:
        word = self._words.get(address)
        if word is None:
            word = self._words[address] = Word(address, itemsize)
            insort(self._sorted, address)
        return word

    def known(self, address: int) -> Word | None:
        return self._words.get(address)

    def within(self, low: int, high: int) -> list[Word]:
        """Words at ``low .. high - 1``."""
        found = self._sorted[bisect_left(self._sorted, low) : bisect_right(self._sorted, high - 1)]
        return [self._words[address] for address in found]

    def drop(self, low: int, high: int) -> None:
        for word in self.within(low, high):
            del self._words[word.address]
            self._sorted.remove(word.address)

    def value(self, word: Word) -> int:
        raw = self._memory.read_word(word.address, word.itemsize, lambda: "weft check")
        return signed(raw, word.itemsize)

    # --- order -------------------------------------------------------------------------------------------------------

    def acquire(self, thread: ThreadClock, word: Word, scope: str, verb: str) -> None:
        """``thread`` has read the word with acquire order. The caller adds the CTA barrier that tells all threads."""
        for known in word.visible(thread.rank, scope):
            thread.learn(known)
        code = self._races.code() if isinstance(thread, ProgramClock) else None
        thread.notes |= self._missed(word, thread.rank, scope)
        thread.hasty = word.hasty
        for other, note in word.notes.items():
            thread.notes.setdefault(other, note)
        thread.sync = Sync(verb, word.address, code)

    def relaxed(self, thread: ThreadClock, word: Word, scope: str) -> None:
        """``thread`` has read the word without acquire order: only a fence makes one of it."""
        for known in word.visible(thread.rank, scope):
            if isinstance(thread, ProgramClock):
                thread.saw(known)
        place = self._races.place(self._races.code())
        for other, _, _, _ in word.writers:
            sentence = (
                f"line {place.line if place else '?'} reads {self._memory.describe(word.address)} without acquire order"
            )
            thread.notes.setdefault(other, ("relaxed-order", sentence))

    def release(self, thread: ThreadClock, word: Word, scope: str, verb: str, *, keeps: bool) -> Callable[[], None]:
        """``thread`` writes the word with release order; ``keeps``: by a read-modify-write, which goes on with the sequence.

        Returns what to call when the write is in memory: acquires know of it from then on."""
        is_program = isinstance(thread, ProgramClock)
        code = self._races.code() if is_program else None
        hasty = None
        if is_program:
            thread.releases.append(Release(thread.stamp(SCALAR)[2], code, word.address))
            hasty = (thread.ahead, code) if thread.ahead is not None else None
        known, notes = thread.publish(), dict(thread.notes)
        thread.sync = Sync(verb, word.address, code)

        def landed() -> None:
            if is_program:
                word.hasty = hasty
            if not keeps:
                word.forget()
            word.unreleased.pop(thread, None)
            word.release(thread.rank, known, scope)
            word.notes |= notes
            if scope != "sys":
                where = self._races.place(code)
                word.unreleased[thread] = ("scope", f"the release in {where} has scope {scope}", scope)

        return landed

    def unordered(self, thread: ThreadClock, word: Word, scope: str | None, *, keeps: bool) -> Callable[[], None]:
        """``thread`` writes the word without release order (``scope`` None: a plain store). Returns as ``release`` does."""
        known = thread.relaxed() if isinstance(thread, ProgramClock) and scope is not None else None
        is_fenced = known is not None and thread.fenced is not None
        place = self._races.place(self._races.code()) if isinstance(thread, ProgramClock) else thread.label

        def landed() -> None:
            if not keeps:
                word.forget()
            if known is not None:
                word.release(thread.rank, known, scope)
            if is_fenced:
                return
            word.unreleased[thread] = (
                "relaxed-order",
                f"{place} writes {self._memory.describe(word.address)} without release order",
                "",
            )

        return landed

    def _missed(self, word: Word, rank: int, scope: str) -> dict[ThreadClock, tuple[str, str]]:
        """Writers that an acquire of ``rank`` at ``scope`` does not synchronise with, and why."""
        missed = {}
        for thread, (kind, sentence, within) in word.unreleased.items():
            if within == "gpu" and thread.rank == rank:
                continue
            who = "another program" if within == "cta" else f"rank {rank}"
            missed[thread] = (kind, f"{sentence}, so it does not order {who}" if kind == "scope" else sentence)
        if scope != "sys":
            for thread, _, _, _ in word.writers:
                if thread.rank != rank or scope == "cta":
                    who = "program's" if scope == "cta" else "rank's"
                    missed.setdefault(
                        thread, ("scope", f"the acquire has scope {scope}, so no other {who} release orders it")
                    )
        return missed

    # --- what goes wrong with signals --------------------------------------------------------------------------------

    def stored(self, word: Word, access: Access, new: int, launch: int, old: int | None = None) -> None:
        """A word is being set, from ``old`` or what memory still has. Reports what is wrong with the value."""
        thread = access.thread
        old = self.value(word) if old is None else old
        back = _is_back(word, old, new)
        word.wrote(thread, access.code, access.verb, new)
        self._took(word, new)
        if access.verb == "notify":
            word.notify_launches.add(launch)
            if back:
                word.back = f"{self._races.line_of(access)} sets a signal that has {old} to {new}", access
                if word.wait_launches or self._waiting_for(word) is not None:
                    self.awaited(word)
            return
        if not back:
            return
        access.resets = True
        waiter = self._waiting_for(word)
        if waiter is not None:
            text = f"{self._races.line_of(access)} sets a signal from {old} to {new} while {waiter} waits for it"
            self._report("signal-reset", text, word, [access])

    def sets_back(self, word: Word, new: int) -> bool:
        """True if ``new`` is less than what memory has."""
        return _is_back(word, self.value(word), new)

    def added(self, word: Word, access: Access, new: int, launch: int) -> None:
        word.wrote(access.thread, access.code, access.verb, new)
        word.notify_launches.add(launch)
        word.added += 1
        self._took(word, new)

    def awaited(self, word: Word) -> None:
        """Report a notify that has set the word back, now that a program waits for the word."""
        if word.back is not None:
            (text, access), word.back = word.back, None
            self._report("epoch-back", text, word, [access])

    def waited(self, word: Word, wanted: int, launch: int) -> None:
        self.awaited(word)
        if wanted > 0:
            word.wanted = max(word.wanted, wanted)
            word.wait_launches.add(launch)

    def polled(self, word: Word, thread: ThreadClock) -> None:
        """A raw load or atomic that only looks: is it a loop that waits for equality?"""
        code = self._races.code() if isinstance(thread, ProgramClock) else None
        if code is not None and is_polled(code[0].co_filename, code[1]):
            self.awaited(word)
        if code is not None and word.equality is None and waits_for_one_value(code[0].co_filename, code[1]):
            word.equality = (thread, code)
            self._equality(word)

    def finish(self) -> None:
        """At the end of a run: counts that nobody waited for."""
        for word in self._words.values():
            calls = len(word.notify_launches) / max(1, len(word.wait_launches))
            if word.added > 1 and word.wanted > 0 and self.value(word) > word.wanted * calls:
                name, count = self._memory.describe(word.address), self.value(word)
                text = f"{name} ends at {count}, and the most that is waited for is {word.wanted}"
                access = self._last_access(word)
                self._report("overshoot", text, word, [access] if access else [])

    def cause(self, address: int) -> list[str]:
        """Why a wait for the word at ``address`` may never end: who notified it, or whom else the notifies went to."""
        word, name = self._words.get(address), self._memory.describe(address)
        if word is not None and word.writers:
            thread, code, verb, value = word.writers[-1]
            return [
                f"{name}: last written by {thread.label} ({verb}, {self._races.place(code) or 'host code'}), value {value}"
            ]
        extent = self._memory.find(address)
        lines = [f"{name}: nobody ever notifies it"]
        if extent is not None:
            others = [
                w
                for w in self._words.values()
                if w.writers and (f := self._memory.find(w.address)) and f.name == extent.name
            ]
            for other in others[:3]:
                thread, code, verb, value = other.writers[-1]
                where = self._races.place(code) or "host code"
                lines.append(
                    f"{self._memory.describe(other.address)} was: by {thread.label} ({verb}, {where}), value {value}"
                )
        return lines

    def _last_access(self, word: Word) -> Access | None:
        thread, code, verb, _ = word.writers[-1]
        return Access(0, thread, SCALAR, 0, 0, 0, verb, code, "sys", thread.sync)

    def _took(self, word: Word, value: int) -> None:
        word.values.add(value)
        self._equality(word)

    def _equality(self, word: Word) -> None:
        if word.equality is not None and len(word.values) > 1:
            thread, code = word.equality
            access = Access(0, thread, SCALAR, 0, 0, 0, "poll", code, "sys", thread.sync)
            text = f"{self._races.line_of(access)} waits for one value of a signal that takes {sorted(word.values)}"
            self._report("equality-wait", text, word, [access])

    def _waiting_for(self, word: Word) -> str | None:
        for task in self._races.machine.scheduler.waiting_tasks():
            if task.waiting is not None and task.waiting.low == word.address:
                return task.label
        return None

    def _report(self, kind: str, text: str, word: Word, accesses: list[Any]) -> None:
        extent = self._memory.find(word.address)
        if extent is None:
            return
        index = (word.address - extent.base) // extent.itemsize
        self._races.report(kind, text, accesses, extent.name, extent.rank, index, index)


def _is_back(word: Word, old: int, new: int) -> bool:
    bits = 8 * word.itemsize
    return (new - old) % (1 << bits) >= 1 << (bits - 1)


def signed(word: int, itemsize: int) -> int:
    bits = 8 * itemsize
    word = int(word) & ((1 << bits) - 1)
    return word - (1 << bits) if word >> (bits - 1) else word


def addresses_in(word: Word, addresses: np.ndarray) -> np.ndarray:
    """Where among ``addresses`` the word is."""
    return np.flatnonzero(addresses == np.uint64(word.address))
