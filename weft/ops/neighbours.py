"""Neighbours of a design in a search: one field moved at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def moved(design: T, **values: Iterable[Any]) -> Iterator[T]:
    """Copies of ``design`` with one field changed to one of its ``values``, if the class accepts it."""
    for name, options in values.items():
        for value in options:
            if value == getattr(design, name):
                continue
            try:
                yield dataclasses.replace(design, **{name: value})  # type: ignore[type-var]
            except ValueError:
                continue


def scaled(value: int, low: int = 1, high: int = 1 << 30) -> tuple[int, ...]:
    """Half of ``value`` and twice it, within ``low`` .. ``high``."""
    return tuple(size for size in (value // 2, value * 2) if low <= size <= high)
