"""One planted bug and its correct twin: the same kernel with the constant BUG set or not.

A line that ends in ``# here`` is one that the finding must name; the finding names no others, and there is no second finding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

N = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """kind       what the check must call it;  tensor: where;  kernels: in whose source the lines are marked
    what       the mistake, in a few words;  published: it is one that published libraries ship
    also       kinds of findings beside it that do not follow from it
    mark       how the lines end that the finding must name, if not in "# here"
    """

    name: str
    main: Callable[..., Any]
    kind: str
    tensor: str
    what: str
    kernels: tuple[Any, ...] = ()
    also: tuple[str, ...] = ()
    published: bool = False
    world_size: int = 2
    sms: int | None = None
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
    """Decorator of ``main(team, bug)``."""

    def add(main: Callable) -> Callable:
        EXHIBITS.append(
            Exhibit(name=main.__name__, main=main, kind=kind, tensor=tensor, what=what, kernels=kernels, **more)
        )
        return main

    return add
