"""Exhibits: a planted bug and its correct twin, which are one kernel with the constant BUG set or not.

The finding must name exactly the lines that end in ``# here``, and must be the only one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

N = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """Planted bug with its expected finding.

    kind       expected kind
    tensor     expected tensor
    kernels    kernels whose source has marked lines
    what       the bug in a few words
    published  True if published libraries have shipped this bug
    source     report of such a bug and its date
    also       kinds of independent further findings
    schedules  runs that suffice for a finding that every schedule shows; None: the default
    mark       comment at the end of the lines that the finding must name
    """

    name: str
    main: Callable[..., Any]
    kind: str
    tensor: str
    what: str
    kernels: tuple[Any, ...] = ()
    also: tuple[str, ...] = ()
    published: bool = False
    source: str = ""
    world_size: int = 2
    sms: int | None = None
    schedules: int | None = None
    mark: str = "here"

    @property
    def lines(self) -> set[int]:
        found = set()
        for kernel in (*self.kernels, self.main):
            source, first = inspect.getsourcelines(getattr(kernel, "fn", kernel))
            found |= {first + i for i, line in enumerate(source) if line.rstrip().endswith(f"# {self.mark}")}
        return found


EXHIBITS: list[Exhibit] = []


def exhibit(kind: str, tensor: str, what: str, *kernels: Any, **more: Any) -> Callable[[Callable], Callable]:
    """Decorator for ``main(team, bug)`` that adds it to the exhibits."""

    def add(main: Callable) -> Callable:
        EXHIBITS.append(
            Exhibit(name=main.__name__, main=main, kind=kind, tensor=tensor, what=what, kernels=kernels, **more)
        )
        return main

    return add
