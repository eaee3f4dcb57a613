"""Words that the simulator runs in its own way instead of interpreting their code.

A word (a ``@triton.jit`` function of the language) is registered with a Python function that stands for it and takes the
running machine first. The language registers its words when it is imported; a machine that is running already is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Word = Callable[..., Any]
Subscriber = Callable[[Any, Word], None]

_WORDS: list[tuple[Any, Word]] = []
_SUBSCRIBERS: list[Subscriber] = []


def simulated(jit_fn: Any) -> Callable[[Word], Word]:
    """Decorator: the function stands for ``jit_fn`` in simulations. Called as ``function(machine, *args, **kwargs)``."""

    def register(word: Word) -> Word:
        _WORDS.append((jit_fn, word))
        for subscriber in _SUBSCRIBERS:
            subscriber(jit_fn, word)
        return word

    return register


def subscribe(subscriber: Subscriber) -> Subscriber:
    """Call ``subscriber(jit_fn, word)`` for every word, those to come included, until ``unsubscribe``."""
    _SUBSCRIBERS.append(subscriber)
    for jit_fn, word in _WORDS:
        subscriber(jit_fn, word)
    return subscriber


def unsubscribe(subscriber: Subscriber) -> None:
    _SUBSCRIBERS.remove(subscriber)
