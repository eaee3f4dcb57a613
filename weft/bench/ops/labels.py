"""Short text of a design, for tables and files of times."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from weft.ops.op import Op
from weft.plan.planned import Planned


def label(op: Op, design: object) -> str:
    """Short text of a design: its name, and the fields that are not the default."""
    return " ".join([op.name_of(design), *(f"{name}={value}" for name, value in _fields(design))])


def _fields(design: object) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(design):
        value = getattr(design, field.name)
        if isinstance(value, Planned):
            continue
        if dataclasses.is_dataclass(value):
            yield from _fields(value)
        elif value != field.default:
            yield field.name, ":".join(map(str, value)) if isinstance(value, tuple) else value
