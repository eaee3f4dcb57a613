"""Memoised choices: made once for equal arguments, so that eager calls do not repeat them on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
MOST = 4096
_caches: list[Any] = []
_results: dict[Hashable, Any] = {}
_generation = 0


def once(key: Hashable, make: Callable[[], T]) -> T:
    """``make()`` at the first call with ``key``, the same result afterwards, until ``forget``.

    A key with a symbolic size of torch.compile has no hash: then ``make()`` runs at every call.
    """
    try:
        return _results[key]
    except KeyError:
        pass
    except TypeError:
        return make()
    if len(_results) >= MOST:
        _results.clear()
    made = _results[key] = make()
    return made


def remembered(function: F) -> F:
    """Memoise ``function`` by its arguments, until ``forget``; calls with symbolic sizes are not stored."""
    cached = functools.lru_cache(MOST)(function)
    _caches.append(cached)

    @functools.wraps(function)
    def ask(*arguments: Any, **options: Any) -> Any:
        for argument in arguments:
            for part in argument if isinstance(argument, tuple) else (argument,):
                if isinstance(part, torch.SymInt):
                    return function(*arguments, **options)
        return cached(*arguments, **options)

    return cast(F, ask)


def generation() -> int:
    """Number of calls of ``forget``, for the keys of what follows from choices and is kept elsewhere."""
    return _generation


def forget() -> None:
    """Clear all remembered choices; call after the tables change."""
    global _generation
    _generation += 1
    _results.clear()
    for cached in _caches:
        cached.cache_clear()
