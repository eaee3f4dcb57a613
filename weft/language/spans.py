"""Tiles and puts of a kernel in the timeline of ``weft.trace``; no code in teams that are not traced.

    began = wl.begin_tile(team)
    ...                                           the tile's loads, products and stores
    wl.end_tile(began, tile_row, tile_column, team)

    began = wl.begin_put(team)
    ...                                           plain or Lamport stores to a peer
    wl.end_put(began, target, nbytes, peer, team)

Waits that had to poll, notifies and the puts of ``put`` and its like record themselves.
"""

import triton
import triton.language as tl

from weft.language.arguments import check_pointers, check_scalars, check_team, check_team_or_none
from weft.language.lowering import tracing


@triton.jit
def begin_tile(team):
    """Start of a tile of this program, for ``end_tile``: an int32 of the clock, 0 without a trace.

    ``team``: None in a kernel that belongs to no team, or is not traced.
    """
    check_team_or_none("begin_tile", team)
    return tracing.begin(team)


@triton.jit
def end_tile(began, row, column, team):
    """End of the tile that began at ``began``: a slice "tile row,column" in the timeline.

    ``row``, ``column``: integer scalars. One thread writes the record, of 32 bytes, and no thread waits for it; a record takes
    up to 0.8 us, so mark tiles, not the steps of a loop along K.
    """
    check_team_or_none("end_tile", team)
    check_scalars("end_tile", began=began, row=row, column=column)
    place = tl.cast(row, tl.int64) | tl.cast(column, tl.int64) << 32
    tracing.record("tile", began, place, 0, 0, True, team)


@triton.jit
def begin_put(team):
    """Start of stores to a peer, for ``end_put``: an int32 of the clock, 0 without a trace."""
    check_team("begin_put", team)
    return tracing.begin(team)


@triton.jit
def end_put(began, target, nbytes, peer, team):
    """End of the stores that began at ``began``: a slice "put to rank peer" in the timeline.

    ``target``: scalar pointer to the first one, in this rank's memory; of Lamport words the ``words`` of the load that
    waits for them. ``nbytes``: integer scalar, 0 if data decide. ``peer``: integer scalar; this rank stands for all peers. A
    record is that of ``end_tile``.
    """
    check_team("end_put", team)
    check_pointers("end_put", target=target)
    check_scalars("end_put", began=began, nbytes=nbytes, peer=peer)
    tracing.record("put", began, target, peer, nbytes, True, team)
