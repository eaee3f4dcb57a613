"""Eager calls of the overlapped ops, replayed where the same tensors come again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from weft.kernels.fp8 import ROWS_OF_CUBLAS, Fp8
from weft.ops.overlap.operands import Operand
from weft.plan.memo import generation
from weft.runtime.launching import is_profiled
from weft.runtime.recording import recorder
from weft.transport.replays import replays_of

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


def submit(op: str, team: Team, operands: Sequence[Operand], fields: Hashable, run: Callable[[], object]) -> None:
    """Call ``run``, or replay a graph of what it submits.

    operands  all that it reads and writes beside workspaces: it returns no tensor
    fields    further arguments of the call on which it depends

    A captured call is recorded launch by launch, and so is one that is traced or profiled.
    """
    launched = team.is_capturing() or recorder() is not None or is_profiled()
    replays = None if launched else replays_of(team)
    if replays is None:
        run()
        return
    # Beside the call: the choices that were made, which the tables may change, and the workspaces.
    key = [op, fields, generation(), team.heap_changes]
    for x in operands:
        if isinstance(x, Fp8):
            key += [_place_of(part) for part in x]
        else:
            key += (x.data_ptr(), x.dtype, x.shape, x.stride())
    replays.submit(tuple(key), run)


def _place_of(part: torch.Tensor | None) -> Hashable:
    """Address and layout of a part of an fp8 matrix; of ragged rows the room that cuBLAS may read, too."""
    if part is None:
        return None
    place = part.data_ptr(), part.dtype, part.shape, part.stride()
    if part.shape[0] % ROWS_OF_CUBLAS == 0:
        return place
    return *place, part.storage_offset(), part.untyped_storage().nbytes()
