"""``Workload`` and its parts: all that the harness knows of what it measures.

A workload, an op or a step of a model at several shapes, is plain data, sent to all ranks. At a shape it makes a ``Problem`` on
each rank, for which every ``Provider`` prepares its way to solve it (``Prepared``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from weft import console
from weft.arguments import did_you_mean
from weft.bench import names
from weft.bench.harness.limits import Limits
from weft.bench.harness.meters import Meter, Stuck
from weft.bench.harness.provider import Prepared, Provider, Refused, Result, Unavailable, Verdict, named_by
from weft.bench.harness.report import REFUSED
from weft.errors import CallMismatch, PeerFailed, PeerSilent, WeftError

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

T = TypeVar("T")
DTYPES = {name: getattr(torch, console.DTYPES[name]) for name in names.DTYPES}
# Errors that end the run.
FATAL = (Stuck, CallMismatch, PeerFailed, PeerSilent)


class Failed(Exception):
    """Error on all ranks: an action raised on one rank. Its message is that rank's reason."""


class OutOfStep(WeftError):
    """Error: a provider started its kernels on some ranks only, so they wait for peers that will not come."""

    def __init__(self, rank: int, what: str, reason: str) -> None:
        super().__init__(f"rank {rank}: {what} failed on some ranks only ({reason}), so nothing after it was measured")
        self.rank, self.what, self.reason = rank, what, reason
        self.reports: list[Any] = []  # results so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    size: tuple[int, ...]
    label: str


class Problem:
    """One shape of a workload on one rank.

    sets      inputs in rotation
    replicas  number of calls in one CUDA graph
    alone     providers do not fit into memory together: each is checked and timed before the next is made
    """

    shape: Shape
    team: Team
    sets: Sequence[Any]
    replicas: int
    alone: bool = False

    def expect(self) -> None:
        """Make what `check` compares with. Collective; Failed if it cannot be made on some rank."""

    def figures(self) -> dict[str, float]:
        """Figures of the inputs for the report, beside the times; {}: none. Collective."""
        return {}

    def poison(self, prepared: Prepared) -> None:
        """Fill the memory that the result will probably get, so that unwritten elements show."""

    def rehearse(self, prepared: Prepared, what: str) -> str:
        """Reason to exclude a provider before its first call; "" if there is none. Collective."""
        return ""

    def check(self, prepared: Prepared, out: Result, what: str) -> Verdict:
        """Verdict of all ranks on the result of ``prepared.run(0)``. Collective; may raise Failed."""
        verdicts: list[Verdict] = self.team.exchange(together(self.team, lambda: self.verdict(prepared, out)))
        wrong = next((f"rank {rank}: {verdict.wrong}" for rank, verdict in enumerate(verdicts) if verdict.wrong), "")
        # A maximum would lose NaN.
        worst = max(filter(math.isfinite, (verdict.max_abs_error for verdict in verdicts)), default=math.inf)
        rms = max(filter(math.isfinite, (verdict.rms_error for verdict in verdicts)), default=math.inf)
        return Verdict(max_abs_error=worst, rms_error=rms, wrong=wrong)

    def verdict(self, prepared: Prepared, out: Result) -> Verdict:
        """Verdict of this rank."""
        raise NotImplementedError

    def forget(self) -> None:
        """Free the memory of the answers."""

    def time(self, prepared: Prepared, what: str, quick: bool) -> dict[str, Any]:
        """Fields of the row with the times, for a problem whose providers are timed ``alone``. Collective."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Op, layer or model at several shapes: plain data, sent to all ranks.

    name       of the op or model benchmark, in commands and reports
    words      names or families of the providers to measure, also such that it lacks; all if empty
    baselines  folder of baselines; None: a checkout's
    """

    name: str
    shapes: tuple[Shape, ...]
    dtype: str = "bf16"
    words: tuple[str, ...] = ()
    baselines: Path | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; choose one of {', '.join(DTYPES)}")

    @property
    def subject(self) -> str:
        """Model of a model benchmark; "" if the shapes name everything."""
        return ""

    def available(self) -> tuple[Provider, ...]:
        """All providers of this workload."""
        raise NotImplementedError

    def providers(self, simulated: bool = False) -> tuple[Provider, ...]:
        """Providers to measure, which ``words`` name. "torch" also names every "torch.…".

        Without words these are all providers; on GPUs without the ones on request. ValueError if none is left.
        """
        available = self.available()
        if not self.words:
            return tuple(one for one in available if not one.on_request or (simulated and not one.rare))
        chosen = tuple(one for one in available if any(named_by(word, one.name) for word in self.words))
        if not chosen:
            names = ", ".join(one.name for one in available)
            near = did_you_mean(self.words[0], [one.name for one in available])
            raise ValueError(f"{self.name} has no provider {', '.join(self.words)}; it has {names}{near}")
        return chosen

    def lacking(self, words: Sequence[str]) -> list[str]:
        """Members of ``words`` that name no provider of this workload."""
        names = [one.name for one in self.available()]
        return [word for word in words if not any(named_by(word, name) for name in names)]

    def problem(self, shape: Shape, team: Team) -> Problem:
        """Problem of this rank at a shape. Not collective."""
        raise NotImplementedError

    def parts(self, team: Team, meter: Meter) -> dict[str, float] | None:
        """Breakdown of the time of a provider by kind of kernel; None if not requested. Collective."""
        return None

    def protocol(self, common: dict[str, Any], quick: bool) -> dict[str, Any]:
        """``common``, the harness's description of the timing on GPUs, completed for this workload."""
        raise NotImplementedError

    @property
    def check_rule(self) -> str:
        """Description of the check, for the protocol."""
        raise NotImplementedError

    def moved_bytes(self) -> int:
        """Size of the largest tensor that moves between ranks through workspaces."""
        raise NotImplementedError

    def floor_us(self, world_size: int, size: Sequence[int], limits: Limits | None) -> float | None:
        """Least time of a shape by its traffic and its operations; None if it is not known."""
        raise NotImplementedError

    # --- for tables and pictures ---------------------------------------------------------------------------------------

    @property
    def unit(self) -> str:
        """Unit of ``rate``; "" if there is none."""
        return ""

    def rate(self, world_size: int, size: Sequence[int], microseconds: float) -> float | None:
        """Traffic or operations of a shape over a time, in ``unit``; None if there is none."""
        return None

    @property
    def axis(self) -> str:
        """Name of a picture's x axis."""
        return ""

    @property
    def timed(self) -> str:
        """Unit of work that the times are of."""
        return "a call"

    @property
    def in_milliseconds(self) -> bool:
        """True if tables give times in ms, False for µs."""
        return False

    @property
    def time_unit(self) -> str:
        """Unit of a table's times, for its title."""
        return "ms" if self.in_milliseconds else "µs"

    @property
    def step_layers(self) -> int:
        """Number of layers in one step, by which a breakdown is divided."""
        return 1

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences below a table about its times."""
        return ()


def together(team: Team, action: Callable[[], T], launches: str | None = None) -> T:
    """Result of ``action``; Failed on all ranks, with the first rank's reason, if it raised on any.

    ``action`` must not be collective, since a rank that raises would leave its peers in it. A provider's may be, if it fails
    on all ranks alike.
    ``launches``: description of its GPU work with waits between ranks. OutOfStep if it raised on some ranks only.
    """
    made, reason = None, None
    try:
        made = action()
    except FATAL:
        raise
    except Exception as error:  # any failure of a provider becomes a row with its reason
        reason = _one_line(error)
    reasons = team.exchange(reason)
    first = next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text), None)
    if first is None:
        return made  # type: ignore[return-value]
    if len(set(reasons)) == 1:
        first = reasons[0]
    if launches and None in reasons:
        raise OutOfStep(team.rank, launches, first)
    raise Failed(first)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, Refused):
        return f"{REFUSED}{text}"[:300]
    spoken = isinstance(error, (WeftError, ValueError, Unavailable, Failed))
    return (text if spoken else f"{type(error).__name__}: {text}")[:300]


def sizes_or_set(
    word: str, count: int, sets: Collection[str], usage: str
) -> tuple[tuple[int, ...], str, tuple[int, ...]]:
    """(``count`` sizes, "", ()) that a word lists, or ((), name of a set, numbers after the colon).

    ValueError for any other word; usage: what the sizes are.
    """
    number = r"[1-9]\d*"
    if re.fullmatch(rf"{number}(,{number}){{{count - 1}}}", word):
        return tuple(map(int, word.split(","))), "", ()
    name, _, listed = word.lower().partition(":")
    if name not in sets or not re.fullmatch(rf"({number}(,{number})*)?", listed):
        raise ValueError(f"--shapes {word!r} is neither a set ({', '.join(sets)}) nor {usage}")
    return (), name, tuple(map(int, listed.split(","))) if listed else ()


def listed_shapes(
    word: str,
    count: int,
    sets: Collection[str],
    usage: str,
    small: tuple[int, ...],
    named: Callable[[str, tuple[int, ...]], Sequence[tuple[int, ...]]],
) -> list[Shape]:
    """Shapes of a word that lists sizes or names a set.

    A set gives ``small`` unless that is empty, else the sizes named(set, numbers).
    """
    given, name, numbers = sizes_or_set(word, count, sets, usage)
    sizes = [given or small] if given or small else named(name, numbers)
    return [Shape(size=tuple(size), label="x".join(map(str, size))) for size in sizes]


def words_apart(text: str) -> list[str]:
    """Words of a list. A number belongs to the numbers before it, or to the rows of a set."""
    words: list[str] = []
    for part in text.split(","):
        word = words[-1] if words else ""
        if word and not part.strip()[:1].isalpha() and (":" in word or not word[:1].isalpha()):
            words[-1] = f"{word},{part.strip()}"
        else:
            words.append(part.strip())
    return words
