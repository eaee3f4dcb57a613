"""Record of the plans that ops ask for, from which a search in a warm-up takes its calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from weft.plan.memo import forget

if TYPE_CHECKING:
    from weft.plan.planned import Machine

# (name of the op, its call, machine)
Asked = tuple[str, Any, "Machine"]
# Records that are being written. Virtual ranks share a process, so each record gets the calls of all ranks.
RECORDS: list[dict[Asked, None]] = []


@contextmanager
def recorded() -> Iterator[dict[Asked, None]]:
    """Scope that records the calls whose plans are asked for, plans within plans included, in their order."""
    record: dict[Asked, None] = {}
    RECORDS.append(record)
    forget()  # plans within memoised plans would not be asked for
    try:
        yield record
    finally:
        RECORDS[:] = [one for one in RECORDS if one is not record]


def note(op: str, call: Any, machine: Machine) -> None:
    """Add a call to all records."""
    for record in RECORDS:
        record[op, call, machine] = None
