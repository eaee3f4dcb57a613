"""The page table of gathered pages leads to every token that a prefill attends to."""

import numpy
import pytest

from weft.parallel.context import GatheredLayout

PAGE = 16


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("window", [None, 1, 20, 500])
@pytest.mark.parametrize("room", [{}, {"entries": 40, "tokens": 400, "batch": 5}], ids=["exact", "padded"])
def test_gathered_pages_hold_all_tokens_of_the_window(world_size, window, room):
    sequences = [(0, 3), (15, 1), (16, 40), (5 * PAGE * world_size + 7, 30), (PAGE * world_size, PAGE)]
    layout = GatheredLayout.make(sequences, PAGE, world_size, window=window, **room)
    entries = room.get("entries", len(layout.rows))
    assert layout.pages == world_size * entries + room.get("tokens", 90) // PAGE + 5 + 1
    # Each cell of a gathered page: (sequence, position) of its token.
    cells = numpy.full((layout.pages, PAGE, 2), -1)
    for at, (row, column) in enumerate(zip(layout.rows, layout.columns, strict=True)):
        for rank in range(world_size):
            first = (column * world_size + rank) * PAGE
            cells[rank * entries + at, :, 0] = row
            cells[rank * entries + at, :, 1] = first + numpy.arange(PAGE)
    flat, token = cells.reshape(-1, 2), 0
    for row, (before, length) in enumerate(sequences):
        for position in range(before, before + length):
            flat[layout.slots[token]] = row, position
            token += 1
    assert len(set(layout.slots[:token])) == token
    assert (layout.slots[token:] == (layout.pages - 1) * PAGE).all()  # padding
    for row, (before, length) in enumerate(sequences):
        first = 0 if window is None else max(0, before + 1 - window)
        for position in range(first, before + length):
            assert cells[layout.table[row, position // PAGE], position % PAGE].tolist() == [row, position]
    if window == 1:
        assert len(layout.rows) == 3  # only pages into which the sequences go on
