"""Epochs that a kernel begins again, since no program has ended them (``wl.advance_epoch``)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from weft.check.detector.races import Races, elements_at
from weft.check.detector.thread_clocks import Access, ThreadClock
from weft.simulator.interpreter import CodeLine


@dataclass(slots=True, kw_only=True)
class Begun:
    """Epoch ``number`` as a launch has begun it.

    last    last write of the number then
    tensor  holds the number, and keeps its address from being used again; None in a heap, whose tensors are freed by name
    ended   programs that have ended their parts
    """

    launch: int
    code: CodeLine | None
    number: int
    last: Access | None
    programs: int
    tensor: torch.Tensor | None
    ended: set[ThreadClock] = field(default_factory=set)


class Epochs:
    """Latest epochs that kernels have begun, by rank and address of their number."""

    def __init__(self, races: Races) -> None:
        self._races = races
        self._begun: dict[tuple[int, int], Begun] = {}

    def began(self, thread: ThreadClock, address: int, itemsize: int) -> None:
        """Note that a program begins an epoch, and report one that a launch of the same line has begun before.

        Kernels of several lines may share an epoch that the last line ends.
        """
        before, code = self._begun.get((thread.rank, address)), self._races.code()
        if thread.grid is None or (before is not None and before.launch == thread.launch):
            return
        number = self._races.memory.read_word(address, itemsize, lambda: thread.label) + 1
        last = self._races.last_store(address)
        now = self._begun[thread.rank, address] = Begun(
            launch=thread.launch, code=code, number=number, last=last, programs=thread.grid.total,
            tensor=next((t for t in thread.grid.launch.tensors if self._lies_in(t, address)), None),
        )  # fmt: skip
        if before is None or (before.code, before.number) != (code, number) or before.last is not last:
            return
        missing = before.programs - len(before.ended)
        text = (
            f"launch {now.launch} of rank {thread.rank} begins epoch {number} again: launch {before.launch} began it, and "
            f"{missing} of its {before.programs} program(s) ended without wl.advance_call or wl.advance_epoch"
        )
        access = Access.of(thread, "begin of an epoch", code)
        extent = self._races.memory.find(address)
        self._races.report("unadvanced", text, [access], elements_at(extent, address, address))

    def ended(self, thread: ThreadClock, address: int) -> None:
        begun = self._begun.get((thread.rank, address))
        if begun is not None and begun.launch == thread.launch:
            begun.ended.add(thread)

    def drop(self, low: int, high: int) -> None:
        """Forget epochs whose numbers lie at ``low .. high - 1``, which are no longer known."""
        for key in [key for key, begun in self._begun.items() if low <= key[1] < high and begun.tensor is None]:
            del self._begun[key]

    def _lies_in(self, tensor: torch.Tensor, address: int) -> bool:
        storage = tensor.untyped_storage()
        return 0 <= address - storage.data_ptr() < storage.nbytes() and not self._races.memory.in_heap(address)
