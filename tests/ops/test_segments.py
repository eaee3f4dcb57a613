"""How rows are cut and joined for library GEMMs."""

from hypothesis import given
from hypothesis import strategies as st

from weft.ops.segments import pieces_of, runs_of


@given(st.integers(1, 9), st.integers(0, 8), st.integers(1, 9))
def test_runs_hold_every_peer_once_in_the_order_of_ranks(world, first, span):
    first %= world
    runs = list(runs_of(first, world, span))
    assert [rank for run in runs for rank in run] == [(first + step) % world for step in range(world - 1)]
    assert all(0 <= run.start < run.stop <= world and len(run) <= span for run in runs)


@given(st.integers(0, 100), st.integers(1, 8))
def test_pieces_hold_every_row_once_and_none_is_empty(rows, count):
    pieces = list(pieces_of(rows, count))
    assert [number for number, _ in pieces] == list(range(len(pieces)))
    assert [row for _, piece in pieces for row in range(piece.start, piece.stop)] == list(range(rows))
    assert len(pieces) <= count
    assert all(piece.start < piece.stop for _, piece in pieces)
