"""Consequential findings: each is listed under its cause and not counted.

    divergence, overshoot,        under any ordering finding, one about tiles, or call-mismatch
    an AssertionError of main
    uninitialised                 under an ordering finding of that tensor at the reading line
    deadlock                      under a finding of the awaited signals, one about tiles, or call-mismatch
    tile-read, tile-store,        under tile-owner
    out-of-bounds
    an ordering finding           under one of the signal through which its second side synchronised last; or under one of the
                                  same tensor that shares a line with it and names a more specific cause
    early-access                  under another one, or `unfollowed`, of the same kernel
    a finding of that kernel,     under unadvanced
    or one without a place
    uncleared                     under an ordering finding of two stores to that stage; a race with a load follows from it

Only findings of a common run are folded (`divergence`: of a common world size), and only under findings that no marker allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.check.detector.findings import RACES, TILES, Finding, Side

# Kinds that may make results differ between schedules.
DISORDER = RACES | {"uncleared"}
_HANGS = DISORDER | {"epoch-back", "equality-wait"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Finding with the numbers of the runs that showed it."""

    finding: Finding
    runs: frozenset[int]


def causes_of(seen: Sequence[Seen]) -> list[int]:
    """Index of each finding's cause; of a finding without a cause, the finding's."""
    parents = list(range(len(seen)))

    def root(index: int) -> int:
        while parents[index] != index:
            index = parents[index]
        return index

    for index, effect in enumerate(seen):
        for other, cause in enumerate(seen):
            if other != index and root(other) != index and _explains(cause, effect, earlier=other < index):
                parents[index] = other
                break
    return [root(index) for index in range(len(seen))]


def _explains(cause: Seen, effect: Seen, *, earlier: bool) -> bool:
    one, other = cause.finding, effect.finding
    if one.allowed is not None or other.allowed is not None or not cause.runs & effect.runs:
        return False
    rule = _BY_CAUSE.get(one.kind) or _BY_EFFECT.get(other.kind)
    return rule is not None and rule(_Pair(one, other, earlier, effect.runs <= cause.runs))


@dataclass(frozen=True, slots=True)
class _Pair:
    """Possible cause and its possible effect.

    earlier  the cause stands before the effect
    always   no run shows the effect without the cause
    """

    cause: Finding
    effect: Finding
    earlier: bool
    always: bool

    @property
    def shares_tensor(self) -> bool:
        return bool(self.cause.tensor) and self.cause.tensor == self.effect.tensor

    @property
    def shares_line(self) -> bool:
        """True if both are of one tensor and have a line in common."""
        return self.shares_tensor and bool(_places(self.cause) & _places(self.effect))

    @property
    def is_wrong_result(self) -> bool:
        """True if the effect is an AssertionError that main raises in no run without the cause."""
        return self.always and _is_assertion(self.effect)


def _under_unadvanced(pair: _Pair) -> bool:
    effect = pair.effect
    if _is_assertion(effect):
        return True
    if effect.kind not in RACES | {"uninitialised", "overshoot", "deadlock", "divergence"}:
        return False
    return not effect.sides or _kernel(pair.cause) in map(_kernel_of, effect.sides)


def _under_tiles_or_calls(pair: _Pair) -> bool:
    misplaced = pair.cause.kind == "tile-owner" and pair.effect.kind in ("tile-read", "tile-store", "out-of-bounds")
    return pair.is_wrong_result or misplaced or pair.effect.kind in ("divergence", "overshoot", "deadlock")


def _early_access(pair: _Pair) -> bool:
    if pair.cause.kind not in ("early-access", "unfollowed"):
        return _race(pair)
    same_kernel = _kernel(pair.cause) == _kernel(pair.effect)
    return same_kernel and (pair.earlier or pair.cause.kind == "unfollowed")


def _race(pair: _Pair) -> bool:
    cause, effect = pair.cause, pair.effect
    if cause.kind == "uncleared":
        return pair.shares_line and not _is_of_stores(effect)
    if cause.kind not in RACES:
        return False
    if not pair.shares_tensor:
        return effect.through == cause.tensor != "" and (pair.earlier or cause.through != effect.tensor)
    says_more = (cause.kind != "race") - (effect.kind != "race")
    return pair.shares_line and (says_more > 0 or says_more == 0 and pair.earlier)


# Does the cause explain the effect? By the cause's kind where it has a rule, else by the effect's.
_BY_CAUSE: dict[str, Callable[[_Pair], bool]] = {
    "unadvanced": _under_unadvanced,
    **dict.fromkeys((*TILES, "call-mismatch"), _under_tiles_or_calls),
}
_BY_EFFECT: dict[str, Callable[[_Pair], bool]] = {
    **dict.fromkeys(RACES, _race),
    "early-access": _early_access,
    "divergence": lambda pair: pair.cause.kind in DISORDER,
    "overshoot": lambda pair: pair.cause.kind in RACES,
    "error": lambda pair: pair.cause.kind in DISORDER and pair.is_wrong_result,
    "uninitialised": lambda pair: pair.cause.kind in RACES and pair.shares_line,
    "deadlock": lambda pair: pair.cause.kind in _HANGS and pair.shares_tensor,
    "uncleared": lambda pair: pair.cause.kind in RACES and pair.shares_line and _is_of_stores(pair.cause),
}


def _places(finding: Finding) -> set[tuple[str, int]]:
    return {(side.place.file, side.place.line) for side in finding.sides if side.place is not None}


def _is_of_stores(finding: Finding) -> bool:
    return all("load" not in side.verb for side in finding.sides)


def _is_assertion(finding: Finding) -> bool:
    return finding.kind == "error" and finding.message.startswith("AssertionError")


def _kernel(finding: Finding) -> str:
    """Kernel of the later side."""
    return _kernel_of(finding.sides[-1]) if finding.sides else ""


def _kernel_of(side: Side) -> str:
    """Kernel of a side's task, from "rank 0 kernel NAME program 1"."""
    return side.task.partition(" kernel ")[2].partition(" program ")[0]
