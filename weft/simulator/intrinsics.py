"""Intrinsics: primitives that the simulator runs as Python functions, without interpretation.

An intrinsic stands in for a ``@triton.jit`` function of the language and takes the running machine as its first argument.
The language registers its intrinsics when it is imported; a machine that is already running is told of new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Intrinsic = Callable[..., Any]
Subscriber = Callable[[object, Intrinsic], None]

_INTRINSICS: list[tuple[object, Intrinsic]] = []
_SUBSCRIBERS: list[Subscriber] = []


def simulated(jit_fn: object) -> Callable[[Intrinsic], Intrinsic]:
    """Decorator for a function that replaces ``jit_fn`` in simulations.

    Called as ``function(machine, *args, **kwargs)``.
    """

    def register(intrinsic: Intrinsic) -> Intrinsic:
        _INTRINSICS.append((jit_fn, intrinsic))
        for subscriber in _SUBSCRIBERS:
            subscriber(jit_fn, intrinsic)
        return intrinsic

    return register


def subscribe(subscriber: Subscriber) -> Subscriber:
    """Call ``subscriber(jit_fn, intrinsic)`` for every intrinsic, present and future."""
    _SUBSCRIBERS.append(subscriber)
    for jit_fn, intrinsic in _INTRINSICS:
        subscriber(jit_fn, intrinsic)
    return subscriber


def unsubscribe(subscriber: Subscriber) -> None:
    _SUBSCRIBERS.remove(subscriber)
