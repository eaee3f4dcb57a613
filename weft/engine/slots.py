"""Batch slots on the device: positions, page tables, sampling parameters. The host sends changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch

from weft.engine.params import SamplingParams
from weft.runtime.arithmetic import cdiv
from weft.runtime.copying import upload

# Fields of a slot that are one number.
DTYPES = {
    "positions": torch.int64, "seed": torch.int64, "top_k": torch.int64,
    "temperature": torch.float32, "top_p": torch.float32, "min_p": torch.float32,
}  # fmt: skip
# Of those, the sampling parameters.
SAMPLING = [name for name in DTYPES if name != "positions"]
# Int32 words to whose multiples fields are aligned: kernels are compiled for pointers of 16 bytes.
ALIGNMENT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """State of a batch slot; `position`: of the token that the next decode step takes.

    pages  the sequence's; page 0 stands for those that it has given back, before the windows of all layers
    """

    position: int
    pages: list[int]
    params: SamplingParams


class Slots:
    """Fields of `max_batch` batch slots on `device`, at fixed addresses. At first all are empty.

    positions                              [max_batch] int64; -1: the slot is empty. Decode steps advance it on the device
    table                                  [max_batch, max_pages] int32
    seed, top_k                            [max_batch] int64
    temperature, top_p, min_p              [max_batch] fp32
    occupied                               slots that `send` has filled and not emptied

    They are views of one buffer of int32 words, of which the host has a copy. So any changes together are one copy to the
    device, of the words and their places, and one kernel.
    """

    def __init__(self, max_batch: int, max_pages: int, device: torch.device) -> None:
        shapes = {name: (max_batch,) for name in DTYPES} | {"table": (max_batch, max_pages)}
        dtypes = DTYPES | {"table": torch.int32}
        begins, sizes, end = {}, {}, 0
        for name, shape in shapes.items():
            begins[name], sizes[name] = end, dtypes[name].itemsize // 4 * (shape[1] if len(shape) > 1 else 1)
            end += cdiv(max_batch * sizes[name], ALIGNMENT) * ALIGNMENT
        self._words = torch.zeros(end, dtype=torch.int32)
        self._there = torch.zeros(end, dtype=torch.int32, device=device)

        def views(words: torch.Tensor) -> dict[str, torch.Tensor]:
            parts = {name: words[begin : begin + max_batch * sizes[name]] for name, begin in begins.items()}
            return {name: part.view(dtypes[name]).view(shapes[name]) for name, part in parts.items()}

        there = views(self._there)
        self.positions, self.table, self.seed, self.top_k = (
            there[name] for name in ("positions", "table", "seed", "top_k")
        )
        self.temperature, self.top_p, self.min_p = (there[name] for name in ("temperature", "top_p", "min_p"))
        self.positions.fill_(-1)
        self.top_p.fill_(1.0)
        self._here = {name: part.numpy() for name, part in views(self._words).items()}
        self._table_begin, self._max_pages = begins["table"], max_pages
        # Places of a slot's words: first + slot * step, those of its position first.
        first = [numpy.arange(begins[name], begins[name] + size) for name, size in sizes.items()]
        self._first, self._step = numpy.concatenate(first), numpy.repeat(list(sizes.values()), list(sizes.values()))
        self._position_words = sizes["positions"]
        self.occupied: set[int] = set()
        self._forgotten: set[int] = set()

    def forget(self) -> None:
        """Have the next `send` empty all slots that it does not fill.

        After an error the device's copy is uncertain.
        """
        self._forgotten = set(range(len(self.positions)))
        self.occupied.clear()

    def send(self, changes: Mapping[int, SlotState | None], new_pages: Sequence[tuple[int, int, int]] = ()) -> None:
        """Fill slots, or empty them (None), for the next decode step. Others go on by themselves.

        new_pages  (slot, index in its table, page), of slots that stay
        """
        if self._forgotten:
            changes = {**dict.fromkeys(self._forgotten), **changes}
            self._forgotten = set()
        if not changes and not new_pages:
            return
        here, entries = self._here, []
        for slot, index, page in new_pages:
            here["table"][slot, index] = page
            entries.append(self._table_begin + slot * self._max_pages + index)
        filled = [slot for slot, state in changes.items() if state is not None]
        emptied = [slot for slot, state in changes.items() if state is None]
        for slot in filled:
            state = changes[slot]
            here["positions"][slot] = state.position
            for name in SAMPLING:
                here[name][slot] = getattr(state.params, name)
            row = here["table"][slot]
            row[: len(state.pages)] = state.pages
            row[len(state.pages) :] = 0
        here["positions"][emptied] = -1
        self.occupied.update(filled)
        self.occupied.difference_update(emptied)
        self._upload(
            numpy.array(entries, numpy.int64), self._places(filled), self._places(emptied, self._position_words)
        )

    def _places(self, slots: list[int], words: int | None = None) -> numpy.ndarray:
        """Places of these slots' words, or of the first `words` of each."""
        return (self._first[:words] + numpy.array(slots, numpy.int64)[:, None] * self._step[:words]).reshape(-1)

    def _upload(self, *places: numpy.ndarray) -> None:
        """Copy the words at these places to the device."""
        at = numpy.concatenate(places)
        packed = torch.empty(len(at) * 12, dtype=torch.uint8)  # int64 places, then int32 words
        packed[: len(at) * 8].view(torch.int64).numpy()[...] = at
        packed[len(at) * 8 :].view(torch.int32).numpy()[...] = self._words.numpy()[at]
        packed = upload(packed, self._there.device)
        self._there.index_copy_(0, packed[: len(at) * 8].view(torch.int64), packed[len(at) * 8 :].view(torch.int32))


def rows_of(x: torch.Tensor, slots: slice) -> torch.Tensor:
    """Rows of these slots, contiguous: `x` itself for the first slots, a copy for a group.

    Also a copy of one row, since kernels are compiled for pointers of 16 bytes.
    """
    return x[slots] if slots.step is None else x[slots].clone(memory_format=torch.contiguous_format)
