"""Tiles of a kernel in the timeline of ``weft.trace``; no code in teams that are not traced.

    began = wl.begin_tile(team)
    ...                                           the tile's loads, products and stores
    wl.end_tile(began, tile_row, tile_column, team)

Waits that had to poll, notifies and puts record themselves.
"""

import triton
import triton.language as tl

from weft.language.arguments import check_scalars, check_team
from weft.language.coordinates import rank
from weft.language.lowering import tracing


@triton.jit
def begin_tile(team):
    """Start of a tile of this program, for ``end_tile``: an int32 of the clock, 0 without a trace."""
    check_team("begin_tile", team)
    return tracing.begin(team)


@triton.jit
def end_tile(began, row, column, team):
    """End of the tile that began at ``began``: a slice "tile row,column" in the timeline.

    ``row``, ``column``: integer scalars. One thread writes the record, of 32 bytes, and no thread waits for it; a record takes
    up to 0.8 us, so mark tiles, not the steps of a loop along K.
    """
    check_team("end_tile", team)
    check_scalars("end_tile", began=began, row=row, column=column)
    place = tl.cast(row, tl.int64) | tl.cast(column, tl.int64) << 32
    tracing.record("tile", began, place, rank(team), 0, True, team)
