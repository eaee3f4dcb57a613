"""Decisions that are made once for the same arguments: eager calls would make the host repeat each of them, every time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])
MOST = 4096
_caches: list[Any] = []


def remembered(function: F) -> F:
    """A decorator: `function`'s results, by its arguments, until `forget`. Of sizes that torch.compile has left open, which are
    no keys, it is asked each time."""
    cached = functools.lru_cache(MOST)(function)
    _caches.append(cached)

    @functools.wraps(function)
    def ask(*arguments: Any, **options: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, torch.SymInt):
                return function(*arguments, **options)
        return cached(*arguments, **options)

    return cast(F, ask)


def forget() -> None:
    """What was decided by: the rows of weft.plan.table have changed."""
    for cached in _caches:
        cached.cache_clear()
