"""What a debug-mode wait leaves behind when it gives up, read on the host. ``language/lowering/stock.py`` writes it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.errors import WaitTimeout


def raise_from_record(record: torch.Tensor, name_of: Callable[[int], str], tell: Callable[[str], None]) -> None:
    """Raise WaitTimeout if a wait of this rank has given up; ``tell`` is called with its message first."""
    state, rank, program, line, address, wanted, seen, patience_us, *name = record.tolist()
    if state == 0:
        return
    error = WaitTimeout(rank, decode_name(name), program, line, name_of(address), wanted, seen, patience_us / 1e6)
    tell(str(error))
    raise error


def decode_name(words: list[int]) -> str:
    """The kernel's name, packed into int64 words of eight bytes, little end first."""
    packed = b"".join(word.to_bytes(8, "little", signed=True) for word in words)
    return packed.split(b"\0", 1)[0].decode(errors="replace")
