"""Record of a debug-mode wait that gave up, read on the host.

``language/lowering/stock.py`` writes it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.errors import NotAPeer, WaitTimeout, WeftError

# By the record's state. In state 1 the record is claimed but incomplete.
_COMPARISONS = {1: ">=", 2: ">=", 3: "==", 4: "!="}
_STRANGER = 5


def raise_from_record(record: torch.Tensor, name_of: Callable[[int], str], tell: Callable[[str], None]) -> None:
    """Raise WaitTimeout if a wait of this rank has given up, after a call of ``tell`` with its message.

    NotAPeer if it was a kernel that reached for a rank outside of its team.
    """
    state, rank, program, line, address, wanted, seen, patience_us, *name = record.tolist()
    if state == 0:
        return
    kernel, target = decode_name(name), name_of(address)
    if state == _STRANGER:
        place = f"rank {rank}: kernel {kernel}, program {program}, line {line}, pointer to {target}"
        error: WeftError = NotAPeer(place, wanted, seen)
    else:
        error = WaitTimeout(rank, kernel, program, line, target, wanted, seen, patience_us / 1e6, _COMPARISONS[state])
    tell(str(error))
    raise error


def decode_name(numbers: list[int]) -> str:
    """Name of a kernel from little-endian int64 numbers, eight bytes each."""
    packed = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
    return packed.split(b"\0", 1)[0].decode(errors="replace")
